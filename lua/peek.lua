--- peek: what acquire would answer to one call now; writes nothing.
--- KEYS   ring...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] [now_ms]
--- RETURN stamp left now_ms index reset_ms                   it would be admitted; left is before it
--- RETURN stamp -1 now_ms index left reset_ms retry_ms 0     it would be refused
--- RETURN stamp -2 now_ms                                    past its deadline
local stamp, client_now = ARGV[1], ARGV[#KEYS * 4 + 3]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua

local rings = parse_call(now, 2)
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
if left_after(rings) >= 0 then
  local index, left, reset_ms = binding_ring(rings, now)
  return {stamp, left, now, index, reset_ms}
end
local index, left, reset_ms, retry_ms = refusal(rings, now)
return {stamp, -1, now, index, left, reset_ms, retry_ms, 0}
