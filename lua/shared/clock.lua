-- `now`, ms: what the client sent where it sent a time (clock="client"), else Redis's own clock.
-- The caller has put `given` in scope. Not a function: a closure costs the hot path 0.1 us.
local now = given and given ~= '' and given - 0
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + time[2] / 1000
  now = now - now % 1
end
