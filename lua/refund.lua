--- refund: take an admitted amount out of the bucket it was counted in, at most what is there.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] now_ms bucket_start_ms...
--- RETURN guard given now_ms                                 the least given back by any ring
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, at = ARGV[1], #KEYS * 4 + 3
local given = ARGV[at]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

local rings = rings_at(now, 2 + #KEYS)
for i = 1, #KEYS do
  if not string.find(ARGV[at + i] or '', '^%d+$') then rings = nil end
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end
local least
for i = 1, #rings do
  local ring = rings[i]
  local key, number = ring.key, ARGV[at + i] / ring.width
  local back = 0
  if not ring.fresh then
    turn(ring)
    local newest, slot = ring.start / ring.width, number % ring.span
    if number == newest then
      back = math.min(ring.amount, ring.used - ring.closed)
    elseif number < newest and number > newest - ring.span then
      local bucket = redis.call('HGET', key, slot)
      back = math.min(ring.amount, pass(bucket))
      if back > 0 then
        redis.call('HSET', key, slot, (pass(bucket) - back) .. string.match(bucket, '^%d+(.*)$'))
        redis.call('HINCRBY', key, 'closed', -back)
      end
    end
    if back > 0 then count(ring, -back) end
  end
  if not least or back < least then least = back end
end
return {guard, least, now}
