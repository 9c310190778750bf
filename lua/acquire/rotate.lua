-- acquire, the rotation of one ring: its newest bucket is over, or there is no ring. This is the usual
-- case of a key that is called now and then. It mirrors `read_ring`, `rotate` and `add_used` of
-- shared/ring.lua, with fewer commands and without a table per ring, which makes it cheaper;
-- tests/lua/test_rotate.py compares the two on random rings. The newest bucket is written into its
-- slot, buckets that have expired are taken out of the total, and the bucket of now opens. It returns
-- where the call is admitted; otherwise nothing has been written, and acquire/general.lua decides.
if (head == false or age and age >= bucket_ms) and cost >= 1 and cost % 1 == 0
  and tonumber(ARGV[CALLS] or 1) % 1 == 0 and not string.find(client_now or '', '%D')
  and not ARGV[WRITE_LIMIT + 1] then
  local permits, limit, bucket_ms, span, limit_field = ring_arguments(1)
  local new_start = permits and permits >= 1 and now - now % bucket_ms
  local steps = new_start and head and (new_start - start) / bucket_ms or 0
  if new_start and (not head or steps >= span) then
    if limit - permits >= 0 then
      if head then call('DEL', key) end
      call('HSET', key, 'head', new_start, 'used', permits, 'closed', '0',
        'block', '0', 'finished', '0', 'limit', limit_field)
      call('PEXPIRE', key, (span + 1) * bucket_ms)
      return {guard, limit - permits, now}
    end
  elseif new_start and steps <= 8 and steps % 1 == 0 then
    -- Fields 5 and later are the slots of the buckets that expire, oldest first. The last of these
    -- slots is that of the new bucket: its value is ignored from here on, so it is not deleted.
    local number, fields = new_start / bucket_ms, {'used', 'closed', 'block', 'finished'}
    for i = 1, steps do fields[i + 4] = (number - steps + i) % span end
    local values = call('HMGET', key, unpack(fields))
    local newest_passed, closed, expired_slots = values[1] - values[2], values[1] - 0, {}
    for i = 1, steps do
      closed = closed - passed_in(values[i + 4])
      if values[i + 4] and i < steps then expired_slots[#expired_slots + 1] = fields[i + 4] end
    end
    local left, bucket = limit - closed - permits, encode_bucket(newest_passed, values[3], values[4])
    if left >= 0 then
      if expired_slots[1] then call('HDEL', key, unpack(expired_slots)) end
      if bucket ~= newest_passed then call('HSET', key, 'block', '0', 'finished', '0') end
      call('HSET', key, 'head', new_start, 'used', closed + permits, 'closed', closed,
        'limit', limit_field, (number - steps) % span, bucket)
      call('PEXPIRE', key, (span + 1) * bucket_ms)
      return {guard, left, now}
    end
  end
end
