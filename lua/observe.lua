--- observe: add finished calls to the newest bucket: successes, errors, response times.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] now_ms success error rt_sum_ms rt_min_ms
--- RETURN guard 0 now_ms
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, at = ARGV[1], #KEYS * 4 + 3
local given = ARGV[at]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

local rings = rings_at(now, 6)
local success, error, rt, min_rt =
  string.match(table.concat(ARGV, ' ', at + 1), '^(%d+) (%d+) (%d+) (%d+)$')
if not rings or not min_rt or math.max(success, error, rt, min_rt) > MOST then
  return redis.error_reply('ERR distwindow: malformed arguments')
end
for i = 1, #rings do
  local ring = rings[i]
  turn(ring)
  local successes, errors, sum, least =
    string.match(redis.call('HGET', ring.key, 'done'), '(%d+) (%d+) (%d+) (%d+)')
  if not successes then successes, errors, sum = 0, 0, 0 end
  if successes + errors == 0 then least = min_rt end
  redis.call('HSET', ring.key, 'done', string.format('%.0f %.0f %.0f %.0f',
    successes + success, errors + error, sum + rt, math.min(least, min_rt)))
end
return {guard, 0, now}
