--- reset: delete the rings.
--- KEYS   ring...
--- ARGV   stamp [now_ms]
--- RETURN stamp deleted now_ms                               how many rings there were
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

return {stamp, redis.call('DEL', unpack(KEYS)), now}
