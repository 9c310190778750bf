-- acquire, the rotation of one ring: its newest bucket is over, or there is no ring. This is the usual
-- case of a key that is called now and then. It mirrors `read_ring`, `rotate` and `add_used` of
-- shared/ring.lua, with fewer commands and without a table per ring, which makes it cheaper;
-- tests/lua/test_short_paths.py compares the two. The newest bucket is written into its slot, buckets
-- that have expired are taken out of the total, and the bucket of now opens. It returns where the call
-- is admitted; otherwise nothing has been written, and acquire/general.lua decides.
if (head == false or age and age >= bucket_ms) and may_admit and cost % 1 == 0
  and (ARGV[CALLS] or 1) % 1 == 0 and not ARGV[WRITE_LIMIT + 1]
  and limit <= 1e13 and bucket_ms >= 1 and bucket_ms <= 1e13 and string.find(
    permits .. ARGV[3] .. ARGV[4] .. (client_now or '') .. ' ' .. shape, '^%d+ [1-9]%d?%d?%+?1?$') then
  local format, span, limit_field = string.format, tonumber(shape), ARGV[3]
  local shape_ok = not span or span <= 512
  if not span then
    local buckets = tonumber(string.match(shape, '^(%d+)%+1$')) or 513
    span, limit_field, shape_ok = buckets + 1, '-' .. limit_field, buckets <= 512
  end
  local number = (now - now % bucket_ms) / bucket_ms
  local steps, renewal = head and number - start / bucket_ms, span / 4 + 1
  renewal = renewal - renewal % 1
  -- A number as an argument of redis.call costs twice what string.format('%d') does. But a server whose
  -- C `long` has 32 bits cuts a number beyond 2^31 there. A start is one, so it shows that.
  local new_head = format('%d', number * bucket_ms)
  local can_format = new_head - number * bucket_ms == 0 and shape_ok
  if can_format and (not head or steps >= span) then
    if limit - permits >= 0 then
      -- The slots of its buckets are deleted, and not the whole hash (lua/README.md, "Migrating slots"):
      -- if there are any beside the six fields that are set here.
      if head and call('HLEN', key) ~= 6 then
        if span <= 11 then
          call('HDEL', key, '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '10')
        else
          local slots = {}
          for i = 1, span do slots[i] = format('%d', i - 1) end
          call('HDEL', key, unpack(slots))
        end
      end
      call('HSET', key, 'head', new_head, 'used', permits, 'closed', '0', 'block', '0',
        'finished', '0', 'limit', limit_field)
      call('PEXPIRE', key, format('%d', (span + renewal) * bucket_ms))
      return {stamp, limit - permits, now}
    end
  elseif can_format and steps <= 8 and steps % 1 == 0 then
    -- Fields 5 and later are the slots of the buckets that expire, oldest first. The last of these
    -- slots is that of the new bucket: its value is ignored from here on, so it is not deleted.
    local fields = {'used', 'closed', 'block', 'finished', format('%d', (number - steps + 1) % span)}
    for i = 2, steps do fields[i + 4] = format('%d', (number - steps + i) % span) end
    local values = call('HMGET', key, unpack(fields))
    local closed, bucket, expired_slots = values[1] - 0, format('%d', values[1] - values[2]), nil
    for i = 1, steps do
      local expired = values[i + 4]
      if expired then
        closed = closed - (tonumber(expired) or string.match(expired, '^%d+'))
        if i < steps then
          expired_slots = expired_slots or {}
          expired_slots[#expired_slots + 1] = fields[i + 4]
        end
      end
    end
    local left, block, finished = limit - closed - permits, values[3], values[4]
    if left >= 0 then
      if expired_slots then call('HDEL', key, unpack(expired_slots)) end
      if block ~= '0' or finished ~= '0' then
        bucket = bucket .. ' ' .. block .. (finished ~= '0' and ' ' .. finished or '')
        call('HSET', key, 'block', '0', 'finished', '0')
      end
      call('HSET', key, 'head', new_head, 'used', format('%d', closed + permits),
        'closed', format('%d', closed), 'limit', limit_field,
        format('%d', (number - steps) % span), bucket)
      if number % renewal < steps then
        call('PEXPIRE', key, format('%d', (span + renewal) * bucket_ms))
      end
      return {stamp, left, now}
    end
  end
end
