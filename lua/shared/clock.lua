-- `now`, ms: the client's time if it sent one (clock="client"), otherwise the Redis server's.
-- The script has `client_now` in scope. Not a function, because a closure costs the hot path 0.1 us.
local now = client_now and client_now ~= '' and client_now - 0
if not now then
  local time = redis.call('TIME')
  local us = time[2] - 0
  now = time[1] * 1000 + (us - us % 1000) / 1000
end
