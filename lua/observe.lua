--- observe: add finished calls to the newest bucket: successes, errors, response times.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] now_ms success error rt_sum_ms rt_min_ms
--- RETURN guard 0 now_ms
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, at = ARGV[1], #KEYS * 4 + 3
local given = ARGV[at]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/ring.lua

local rings = rings_at(now)
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
for i = 1, #rings do
  local ring = rings[i]
  local key = ring.key
  turn(ring, ring.limit .. ' ' .. ring.bound)
  redis.call('HINCRBY', key, 'success', ARGV[at + 1])
  redis.call('HINCRBY', key, 'error', ARGV[at + 2])
  redis.call('HINCRBY', key, 'rt', ARGV[at + 3])
  local least = redis.call('HGET', key, 'min_rt')
  if not least or ARGV[at + 4] - least < 0 then redis.call('HSET', key, 'min_rt', ARGV[at + 4]) end
end
return {guard, 0, now}
