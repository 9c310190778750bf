--- read: the rings as they are stored, with the shaping of their limits, and the time; writes nothing.
--- KEYS   ring... [shaping...]
--- ARGV   guard [now_ms]
--- RETURN guard 0 now_ms (field value ...)...                one list a key, empty where there is none
--- RETURN guard -2 now_ms                                    past its deadline
local guard, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

local reply = {guard, 0, now}
for i = 1, #KEYS do reply[i + 3] = redis.call('HGETALL', KEYS[i]) end
return reply
