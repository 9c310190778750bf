-- acquire, the first refusal of one ring in a bucket, where one of the three oldest closed buckets, or (in a
-- ring of at most four) the newest bucket, has to expire before there is room. It mirrors acquire/general.lua with fewer
-- commands, which makes it cheaper; tests/lua/test_short_paths.py compares the two. Where it does not
-- decide, it only takes out of `used` what acquire/hot.lua has added.
--
-- A number as an argument of redis.call costs twice what string.format('%d') does. But a server whose C
-- `long` has 32 bits cuts a number beyond 2^31 there: such numbers are left to acquire/general.lua.
if left and left < 0 and cost - permits == 0
  and not string.find(ARGV[3] .. ARGV[4] .. (client_now or ''), '%D') then
  local format, span = string.format, tonumber(shape) or string.match(shape, '%d+') + 1
  -- (A ring of fewer buckets has not so many closed ones: then the values of the other slots are ignored.)
  local number, closed_read = start / bucket_ms, span > 3 and 3 or span - 1
  local values = call('HMGET', key, 'closed', 'block', format('%d', (number + 1) % span),
    format('%d', (number + 2) % span), format('%d', (number + 3) % span))
  local closed, block = tonumber(values[1]), tonumber(values[2])
  -- The permits in the closed buckets that expire first, until there is room: without and with the last.
  local passed_before, passed_upto, room_in = 0, 0, nil
  for i = 1, closed_read do
    local bucket = values[i + 2]
    if bucket and passed_upto + left < 0 then
      passed_before = passed_upto
      passed_upto = passed_upto + (tonumber(bucket) or string.match(bucket, '^%d+') or 0)
      room_in = i * bucket_ms
    end
  end
  local used, left_now, empty_in = limit - left - permits, left + permits, span * bucket_ms
  if passed_upto + left < 0 then
    passed_before, passed_upto, room_in = passed_upto, 1e13, closed_read == span - 1 and empty_in
  end
  if closed and block and room_in and used > closed
    and limit + used + block + permits + empty_in < 2147483648 then
    local min_cost = math.max(1, left_now + passed_before + 1)
    local cost_range = math.min(limit, left_now + passed_upto - min_cost)
    local stored = start .. format(' %d %d %d %d %d %d',
      limit, left_now, min_cost, cost_range, room_in, empty_in)
    -- (A longer value costs the hash its compact encoding: acquire/general.lua.)
    if #stored <= 61 and cost_range >= 0 then
      call('HSET', key, 'head', stored, 'used', format('%d', used),
        'block', format('%d', block + permits))
      return {stamp, -1, now, 1, left_now, empty_in - age, room_in - age, 0}
    end
  end
end
if left then call('HINCRBY', key, 'used', '-' .. permits) end
