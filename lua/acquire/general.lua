-- acquire, the general path: any number of rings, in any state. It validates, decides, then writes.
local rings, calls = parse_rings(now, 3), tonumber(ARGV[CALLS] or 1)
local admitted = calls
for i = 1, rings and #rings or 0 do
  local ring = rings[i]
  ring.cost = calls and calls % 1 == 0 and ring.permits / calls or 0
  if not (ring.cost >= 1 and ring.cost % 1 == 0) then rings = nil break end
  local left = ring.limit - ring.used - ring.peak_excess
  admitted = math.max(0, math.min(admitted, math.floor(left / ring.cost)))
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

for i = 1, #rings do
  local ring = rings[i]
  rotate(ring)
  if ARGV[WRITE_LIMIT] then call('HSET', ring.key, 'limit', ring.limit_field) end
  if admitted > 0 then add_used(ring, ring.cost * admitted) end
  if admitted < calls then
    call('HINCRBY', ring.key, 'block', ring.cost * (calls - admitted))
  end
end

if admitted == calls then
  local index, left, reset_ms = binding_ring(rings, now)
  return append_bucket_starts({stamp, left, now, index, reset_ms}, rings, now)
end
local index, left, reset_ms, retry_ms = refusal(rings, now)
if admitted > 0 then
  return append_bucket_starts(
    {stamp, -1, now, index, left, reset_ms, retry_ms, admitted, binding_ring(rings, now)}, rings, now)
end
-- Store the refusal of one ring in `head`, so that acquire/hot.lua can repeat it.
local ring = rings[1]
if not rings[2] and ring.passed_before and reset_ms > 0 then
  local min_cost, age = math.max(1, left + ring.passed_before + 1), now - ring.start
  local cost_range = math.min(ring.limit, left + ring.passed_upto - min_cost)
  local stored = string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f',
    ring.start, ring.limit, left, min_cost, cost_range, retry_ms + age, reset_ms + age)
  -- A value of more than 64 bytes would cost the hash its compact encoding. The margin is for
  -- `empty_in`, which may gain digits when acquire/hot.lua rewrites it.
  if #stored <= 61 and cost_range >= 0 then call('HSET', key, 'head', stored) end
end
return {stamp, -1, now, index, left, reset_ms, retry_ms, 0}
