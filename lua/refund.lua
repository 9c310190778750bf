--- refund: take admitted permits out of the bucket they were counted in, at most what it holds.
--- KEYS   ring...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] now_ms bucket_start_ms... [borrowed...]
--- RETURN stamp refunded now_ms                              the most permits given back by any ring
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- With `borrowed` 1 the permits were borrowed from that bucket, which may not have begun yet.
-- The position of now_ms, after the arguments of the rings. The first bucket_start_ms follows it.
local NOW = #KEYS * 4 + 3
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

-- Permits that were borrowed from the bucket of this number, as far as the hash knows.
local function borrowed_from(ring, number)
  local stored = redis.call('HGET', ring.key, borrowed_field(ring, number))
  local of_number, permits = string.match(stored or '', '^(%d+) (%d+)$')
  return of_number and of_number - number == 0 and permits - 0 or 0
end

-- Set them.
local function set_borrowed(ring, number, permits)
  local field = borrowed_field(ring, number)
  if permits > 0 then
    redis.call('HSET', ring.key, field, string.format('%.0f %.0f', number, permits))
  else
    redis.call('HDEL', ring.key, field)
  end
end

local rings, flags = parse_rings(now, 2 + 2 * #KEYS), #ARGV - NOW - #KEYS
if flags ~= 0 and flags ~= #KEYS then rings = nil end
for i = 1, #KEYS do
  local borrowed = ARGV[NOW + #KEYS + i] or '0'
  if not string.find(ARGV[NOW + i] or '', '^%d+$') or borrowed ~= '0' and borrowed ~= '1' then
    rings = nil
  end
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local refunded = 0
for i = 1, #rings do
  local ring, is_borrowed = rings[i], ARGV[NOW + #KEYS + i] == '1'
  local key, number = ring.key, ARGV[NOW + i] / ring.bucket_ms
  local taken = 0
  if not ring.is_empty then
    rotate(ring)
    local newest, slot = ring.start / ring.bucket_ms, number % ring.span
    -- What the bucket has passed after this, where it has begun.
    local passed
    if number == newest then
      taken = math.min(ring.permits, ring.used - ring.closed)
      passed = ring.used - ring.closed - taken
    elseif number < newest and number > newest - ring.span then
      local bucket = redis.call('HGET', key, slot)
      taken = math.min(ring.permits, passed_in(bucket))
      passed = passed_in(bucket) - taken
      if taken > 0 then
        redis.call('HSET', key, slot, passed .. string.match(bucket, '^%d+(.*)$'))
        redis.call('HINCRBY', key, 'closed', -taken)
      end
    end
    if taken > 0 then add_used(ring, -taken) end
    if passed or is_borrowed and number > newest then
      local borrowed = borrowed_from(ring, number)
      if not passed then taken = math.min(ring.permits, borrowed) end
      local left = is_borrowed and math.max(0, borrowed - taken) or borrowed
      if passed then left = math.min(left, passed) end
      if left ~= borrowed then set_borrowed(ring, number, left) end
      if ring.last and taken > 0 then rewrite_head(ring) end
    end
  end
  refunded = math.max(refunded, taken)
end
return {stamp, refunded, now}
