--- reset: forget the rings.
--- KEYS   ring...
--- ARGV   guard [now_ms]
--- RETURN guard forgotten now_ms
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, given = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua

return {guard, redis.call('DEL', unpack(KEYS)), now}
