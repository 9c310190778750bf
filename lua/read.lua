--- read: the rings as they are stored, with the shaping of their limits, and the time; writes nothing.
--- KEYS   ring... [shaping...]
--- ARGV   stamp [now_ms]
--- RETURN stamp 0 now_ms (field value ...)...                one list a key, empty where there is none
--- RETURN stamp -2 now_ms                                    past its deadline
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

local reply = {stamp, 0, now}
for i = 1, #KEYS do reply[i + 3] = redis.call('HGETALL', KEYS[i]) end
return reply
