-- acquire, the first refusal of one ring in a bucket, where all permits are in the newest bucket, or one of
-- the three oldest closed buckets, or (in a ring of at most four) the newest, has to expire before there
-- is room. It mirrors acquire/general.lua with fewer commands, which makes it cheaper;
-- tests/lua/test_short_paths.py compares the two. Where it does not decide, it only takes out of `used`
-- what acquire/hot.lua has added.
if left and left < 0 and (not ARGV[CALLS] or cost - permits == 0) and cost <= 1e13 then
  local format, span = string.format, tonumber(shape) or string.match(shape, '%d+') + 1
  local values = counts or call('HMGET', key, 'closed', 'block')
  local closed, block = values[1], values[2]
  local left_now, empty_in = left + cost, span * bucket_ms
  -- The permits in the buckets that expire first, until there is room: without and with the last. Of the
  -- newest bucket, which expires after all others, 1e13: then there is room for every cost.
  local used, passed_before, passed_upto, room_in = limit - left_now, 0, 1e13, empty_in
  local newest_passed = used
  if closed ~= '0' then
    -- (A ring of fewer buckets has not so many closed ones: then the values of the other slots are ignored.)
    local number, closed_read = start / bucket_ms, span > 3 and 3 or span - 1
    values = call('HMGET', key, format('%d', (number + 1) % span), format('%d', (number + 2) % span),
      format('%d', (number + 3) % span))
    newest_passed, passed_upto, room_in = used - (tonumber(closed) or used), 0, nil
    for i = 1, closed_read do
      local bucket = values[i]
      if bucket and passed_upto + left < 0 then
        passed_before = passed_upto
        passed_upto = passed_upto + (tonumber(bucket) or string.match(bucket, '^%d+') or 0)
        room_in = i * bucket_ms
      end
    end
    if passed_upto + left < 0 then
      passed_before, passed_upto, room_in = passed_upto, 1e13, closed_read == span - 1 and empty_in
    end
  end
  -- A number as an argument of redis.call costs twice what string.format('%d') does, and '%.0f' as much. But
  -- a server whose C `long` has 32 bits cuts a number beyond 2^31 with '%d'.
  local digits = limit + used + empty_in < 2147483648 and '%d' or '%.0f'
  local limit_text = format(digits, limit)
  if block ~= '0' then block = tonumber(block) end
  if room_in and newest_passed > 0 and block and limit_text == ARGV[3] then
    local min_cost = left_now + passed_before + 1
    if min_cost < 1 then min_cost = 1 end
    local cost_range = left_now + passed_upto - min_cost
    if cost_range > limit then cost_range = limit end
    -- Where the limit is used up, as it mostly is, some of these numbers are the same.
    local empty_text = format(digits, empty_in)
    local new_head = start .. ' ' .. limit_text
      .. (left_now == 0 and min_cost == 1 and ' 0 1 ' or format(' %.0f %.0f ', left_now, min_cost))
      .. (cost_range == limit and limit_text or format(digits, cost_range)) .. ' '
      .. (room_in == empty_in and empty_text or format(digits, room_in)) .. ' ' .. empty_text
    -- (A longer value costs the hash its compact encoding: acquire/general.lua.)
    if #new_head <= 61 and cost_range >= 0 then
      call('HSET', key, 'head', new_head, 'used', left_now == 0 and limit_text or format(digits, used),
        'block', block == '0' and permits or format('%.0f', block + cost))
      return {stamp, -1, now, 1, left_now, empty_in - age, room_in - age, 0}
    end
  end
end
if left then call('HINCRBY', key, 'used', '-' .. permits) end
