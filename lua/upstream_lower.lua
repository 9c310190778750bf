--- upstream_lower: have each ring count at least so many permits in its window, and at most its limit.
--- KEYS   ring...
--- ARGV   stamp (used limit bucket_ms shape)... now_ms
--- RETURN stamp 0 now_ms added...                            by how many permits each was raised
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
-- The position of the argument that follows those of the rings.
local NOW = #KEYS * 4 + 2
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/borrowed.lua
--@include shared/ring.lua

local rings = parse_rings(now, 1)
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local reply = {stamp, 0, now}
for i = 1, #rings do
  local ring = rings[i]
  rotate(ring)
  local missing = math.max(0, math.min(ring.permits, ring.limit) - ring.used)
  if missing > 0 then add_used(ring, missing) end
  reply[i + 3] = missing
end
return reply
