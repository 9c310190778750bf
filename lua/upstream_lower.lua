--- upstream_lower: have each ring count at least so many permits in its window, and at most its limit.
--- KEYS   ring...
--- ARGV   stamp (used limit bucket_ms shape)... now_ms reset_ms...
--- RETURN stamp 0 now_ms added...                            by how many permits each was raised
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `reset_ms` of a ring: for how long what is added counts, rounded up to its buckets; 0: for a whole window.
-- The position of the argument that follows those of the rings.
local NOW = #KEYS * 4 + 2
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

-- Count more permits for `reset_ms`: in the bucket that expires then, or the newest one.
local function add_for(ring, permits, reset_ms)
  local newest = ring.start / ring.bucket_ms
  local number = math.ceil((now + reset_ms) / ring.bucket_ms) - ring.span
  number = math.max(number, newest + 1 - ring.span)
  if reset_ms > 0 and number < newest and not ring.last then
    local slot = number % ring.span
    local passed, rest = string.match(redis.call('HGET', ring.key, slot) or '0', '^(%d+)(.*)$')
    redis.call('HSET', ring.key, slot, string.format('%.0f', passed + permits) .. rest)
    redis.call('HINCRBY', ring.key, 'closed', permits)
  end
  add_used(ring, permits)
end

local rings, resets = parse_rings(now, 1 + #KEYS), {}
for i = 1, #KEYS do
  resets[i] = whole(ARGV[NOW + i], 0, MAX_TOTAL)
  if not resets[i] then rings = nil end
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local reply = {stamp, 0, now}
for i = 1, #rings do
  local ring = rings[i]
  rotate(ring)
  local missing = math.max(0, math.min(ring.permits, ring.limit) - ring.used)
  if missing > 0 then add_for(ring, missing, resets[i]) end
  reply[i + 3] = missing
end
return reply
