-- acquire, the hot path: one ring whose newest bucket is the bucket of now. It returns where it can
-- decide; otherwise the pieces below decide, and leaves them these:
--   head             the field of that name; false where there is no ring, nil where there are several
--   start, age       the start of the newest bucket and now minus start, ms; nil where not looked at
--   permits, cost    of the whole command, and of one of its calls
--   limit, bucket_ms, shape    the ring's arguments
--   may_admit        true if the call is in time and has a cost
--   left             what the limit leaves where `used` holds the permits of this call, although it may
--                    not: acquire/refuse.lua takes them out. Else nil, and nothing has been written.
--   counts           the fields `closed` and `block`, where they were read
local key, head, start, age, permits, cost, limit, bucket_ms, shape, may_admit, left, counts = KEYS[1]
if not KEYS[2] then
  local calls = ARGV[CALLS]
  permits, limit, bucket_ms, shape = ARGV[2], ARGV[3] - 0, ARGV[4] - 0, ARGV[5]
  head, cost = call('HGET', key, 'head'), permits - 0
  if calls then cost = cost / calls end
  may_admit = now - stamp <= 0 and cost >= 1 and (not calls or cost % 1 == 0)
  if head and may_admit and not ARGV[WRITE_LIMIT] and bucket_ms <= 1e13 then
    if #head < 17 then
      start, age = head, now - head
      -- ('10' is the default, and comparing with it is cheaper than the pattern.)
      if age >= 0 and age < bucket_ms
        and (shape == '10' or string.find(shape, '^[1-9]%d?%d?%+?1?$')) then
        -- A call of the whole limit is refused wherever anything is used, which in a bucket that is open is
        -- nearly always. Where the newest bucket holds all of it, there is room when that expires, and to
        -- read this again costs as much as to repeat a stored refusal.
        if permits == ARGV[3] then
          counts = call('HMGET', key, 'closed', 'block', 'used')
          if counts[3] == permits and counts[1] == '0' then
            local empty_in = (tonumber(shape) or string.match(shape, '%d+') + 1) * bucket_ms - age
            call('HINCRBY', key, 'block', permits)
            return {stamp, -1, now, 1, 0, empty_in, empty_in, 0}
          end
        end
        -- Incrementing and taking back costs one command less than reading before incrementing.
        left = limit - call('HINCRBY', key, 'used', permits)
        if left >= 0 and left <= 1e13 then return {stamp, left, now} end
      end
    else
      -- `head` holds a stored refusal (lua/README.md). Until the bucket ends it is valid for the same
      -- limit and a cost from min_cost to min_cost + cost_range. A smaller cost that fits is admitted,
      -- and lowers `left` and `min_cost`.
      local stored_limit, left, min_cost, cost_range, room_in, empty_in
      start, stored_limit, left, min_cost, cost_range, room_in, empty_in =
        string.match(head, '^(%d+) (%d+) (%-?%d+) (%d+) (%d+) (%d+) (%d+)$')
      age = now - start
      if age >= 0 and age < bucket_ms and stored_limit == ARGV[3] and string.find(shape, '^[1-9]%d?%d?%+?1?$') then
        if cost - min_cost >= 0 and cost - min_cost - cost_range <= 0 then
          call('HINCRBY', key, 'block', permits)
          return {stamp, -1, now, 1, left - 0, empty_in - age, room_in - age, 0}
        elseif left - permits >= 0 then
          call('HINCRBY', key, 'used', permits)
          left, min_cost = left - permits, min_cost - permits
          -- The newest bucket now holds permits, so the ring is empty when that bucket expires.
          empty_in = (tonumber(shape) or string.match(shape, '%d+') + 1) * bucket_ms
          call('HSET', key, 'head', table.concat(
            {start, stored_limit, left, min_cost, cost_range, room_in, empty_in}, ' '))
          return {stamp, left, now}
        end
      end
    end
  end
end
