--- peek_shaped: what acquire_shaped would answer to one call now; writes nothing.
--- KEYS   ring... shaping...
--- ARGV   stamp (permits limit bucket_ms shape)... now_ms (max_wait_ms warmup_ms cold_factor)...
--- RETURN stamp left now_ms index reset_ms wait_us           it would be admitted; left is before it
--- RETURN stamp -1 now_ms index left reset_ms retry_ms       it would be refused
--- RETURN stamp -2 now_ms                                    past its deadline
local NOW = #KEYS * 2 + 2
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua
--@include shared/shaping.lua

local rings = parse_shaped_rings(now, NOW + 1, MAX_SHAPED_MS)
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local admitted, waits_us, index, retry_at_ms = decide_all(rings, now)
if admitted then
  local binding, left, reset_ms = binding_shaped(rings, now, index)
  return {stamp, math.max(0, left), now, binding, reset_ms, waits_us}
end
local retry_ms, reset_ms = retry_at_ms - now, reset_ms_of(rings[index], now)
return {stamp, -1, now, index, left_in(rings[index], now), math.max(reset_ms, retry_ms), retry_ms}
