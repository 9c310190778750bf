--- acquire: count `amount` in the newest bucket of every ring, or refuse and count a block in each.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] [now_ms] [tell]
--- RETURN guard left now_ms                                           one ring, all admitted
--- RETURN guard left now_ms index reset_ms                            all admitted
--- RETURN guard -1 now_ms index left reset_ms retry_ms admitted [index left reset_ms]   refused from `admitted` on
--- RETURN guard -2 now_ms                                             past its deadline, nothing done
--- `times` equal calls share this one: amount = times * cost, and as many are admitted as fit.
--- `tell` notes the limit at once, not only when the next bucket opens.
local call, guard, given = redis.call, ARGV[1], ARGV[#KEYS * 4 + 3]
--@include shared/clock.lua

-- The hot path: one ring, its newest bucket is the present one, and the count leaves room. Counting
-- first and taking back costs one call less than reading first; the script is atomic either way.
if not KEYS[2] and not ARGV[8] then
  local key, amount, start = KEYS[1], ARGV[2], call('HGET', KEYS[1], 'start')
  local age = start and now - start
  if age and age >= 0 and age - ARGV[4] < 0 and now - guard <= 0 and amount - 1 >= 0 then
    local left = ARGV[3] - call('HINCRBY', key, 'used', amount)
    if left >= 0 and left <= 1e15 then return {guard, left, now} end
    call('HINCRBY', key, 'used', -amount)
    -- A refusal in this bucket left a note of when room comes: good for any need between its marks.
    local over, upto, at, closed, idle, busy =
      string.match(call('HGET', key, 'room'), '(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)')
    if over and -left - over > 0 and -left - upto <= 0 and not ARGV[6] then
      call('HINCRBY', key, 'block', amount)
      left = left + amount
      local reset = ARGV[3] - left - closed > 0 and busy or idle
      return {guard, -1, now, 1, left, reset - now, at - now, 0}
    end
  end
end

--@include shared/deadline.lua
--@include shared/ring.lua
--@include shared/verdict.lua

local rings, times = rings_at(now), tonumber(ARGV[#KEYS * 4 + 2] or 1)
local admitted = times
for i = 1, rings and #rings or 0 do
  local ring = rings[i]
  ring.cost = ring.amount / times
  if not (ring.cost >= 1 and ring.cost % 1 == 0) then rings = nil break end
  admitted = math.max(0, math.min(admitted, math.floor((ring.limit - ring.used) / ring.cost)))
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

for i = 1, #rings do
  local ring = rings[i]
  turn(ring, ring.limit .. ' ' .. ring.bound)
  if ARGV[#KEYS * 4 + 4] then call('HSET', ring.key, 'limit', ring.limit .. ' ' .. ring.bound) end
  if admitted > 0 then
    ring.used = call('HINCRBY', ring.key, 'used', ring.cost * admitted)
  end
  if admitted < times then
    call('HINCRBY', ring.key, 'block', ring.cost * (times - admitted))
  end
end

if admitted == times then
  local index, left, reset = binding(rings, now)
  return {guard, left, now, index, reset}
end
local index, left, reset, retry = refusal(rings, now)
if admitted == 0 then
  local ring = rings[1]
  if #rings == 1 and not ring.fresh then
    local busy = ring.start + ring.span * ring.width
    local upto = ring.room_at == busy and 1e15 or ring.upto
    call('HSET', ring.key, 'room', string.format('%.0f %.0f %.0f %.0f %.0f %.0f',
      ring.over, upto, ring.room_at, ring.closed, reset + now, busy))
  end
  return {guard, -1, now, index, left, reset, retry, 0}
end
return {guard, -1, now, index, left, reset, retry, admitted, binding(rings, now)}
