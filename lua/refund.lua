--- refund: take admitted permits out of the bucket they were counted in, at most what it holds.
--- KEYS   ring...
--- ARGV   guard (permits limit bucket_ms shape)... [calls] now_ms bucket_start_ms...
--- RETURN guard refunded now_ms                              the fewest permits given back by any ring
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
-- The position of now_ms, after the arguments of the rings. The first bucket_start_ms follows it.
local NOW = #KEYS * 4 + 3
local guard, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

local rings = parse_rings(now, 2 + #KEYS)
for i = 1, #KEYS do
  if not string.find(ARGV[NOW + i] or '', '^%d+$') then rings = nil end
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local refunded
for i = 1, #rings do
  local ring = rings[i]
  local key, number = ring.key, ARGV[NOW + i] / ring.bucket_ms
  local taken = 0
  if not ring.is_empty then
    rotate(ring)
    local newest, slot = ring.start / ring.bucket_ms, number % ring.span
    if number == newest then
      taken = math.min(ring.permits, ring.used - ring.closed)
    elseif number < newest and number > newest - ring.span then
      local bucket = redis.call('HGET', key, slot)
      taken = math.min(ring.permits, passed_in(bucket))
      if taken > 0 then
        redis.call('HSET', key, slot,
          (passed_in(bucket) - taken) .. string.match(bucket, '^%d+(.*)$'))
        redis.call('HINCRBY', key, 'closed', -taken)
      end
    end
    if taken > 0 then add_used(ring, -taken) end
  end
  if not refunded or taken < refunded then refunded = taken end
end
return {guard, refunded, now}
