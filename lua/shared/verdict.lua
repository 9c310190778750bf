-- What the caller is told. The ring with least left is the one that binds; of the rings that
-- refuse, the one that has room last is named, as no call can pass before that moment.

local function reset_ms(ring, now)
  if ring.used == 0 then return 0 end
  return math.max(0, leaves_at(ring, 1, -1) - now)
end

-- index, left, reset_ms of the ring that has least left.
local function binding(rings, now)
  local index, left
  for i = 1, #rings do
    local here = rings[i].limit - rings[i].used
    if not left or here < left then index, left = i, here end
  end
  return index, left, reset_ms(rings[index], now)
end

-- index, left, reset_ms, retry_ms of the refusal of one more call (of ring.cost each). On the way
-- each refusing ring learns between which needs its answer is the same: `over` < need <= `upto`.
local function refusal(rings, now)
  local index, latest
  for i = 1, #rings do
    local ring = rings[i]
    local need = ring.used + ring.cost - ring.limit
    if need > 0 then
      local room_at
      room_at, ring.over, ring.upto = leaves_at(ring, need, 1)
      if room_at == ring.start + ring.span * ring.width then ring.upto = MOST end
      if not latest or room_at > latest then index, latest = i, room_at end
    end
  end
  local ring = rings[index]
  return index, ring.limit - ring.used, reset_ms(ring, now), latest - now
end

-- Does any ring count in a bucket that begins after now? So it is after the clock was set back.
local function is_ahead(rings, now)
  for i = 1, #rings do
    if rings[i].start > now then return true end
  end
  return false
end

-- `reply`, and behind it the start of each ring's bucket where that does not follow from now: a
-- refund has to name the bucket.
local function with_starts(reply, rings, now)
  if is_ahead(rings, now) then
    for i = 1, #rings do reply[#reply + 1] = rings[i].start end
  end
  return reply
end
