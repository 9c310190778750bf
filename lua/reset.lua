--- reset: delete the rings.
--- KEYS   ring...
--- ARGV   guard [now_ms]
--- RETURN guard deleted now_ms                               how many rings there were
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

return {guard, redis.call('DEL', unpack(KEYS)), now}
