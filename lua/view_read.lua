--- view_read: the minute views of a key as they are stored, and the time; writes nothing.
--- KEYS   views
--- ARGV   stamp now_ms
--- RETURN stamp 0 now_ms (origin seconds ...)                one list, empty where there are no views
--- RETURN stamp -2 now_ms                                    past its deadline
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

return {stamp, 0, now, redis.call('HGETALL', KEYS[1])}
