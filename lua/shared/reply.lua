-- The values of a reply. The binding ring is the one with the fewest permits left; of the rings that
-- refuse, it is the one that has room last, as no call can pass before that moment.

-- ms until the ring is empty if nobody calls again.
local function reset_ms_of(ring, now)
  if ring.last or ring.passed and ring.used > 0 then return borrowed_empty_at(ring) - now end
  if ring.used == 0 then return 0 end
  return math.max(0, expires_at(ring, 1, -1) - now)
end

-- index, left, reset_ms of the ring that has the fewest permits left.
local function binding_ring(rings, now)
  local index, left
  for i = 1, #rings do
    local left_here = rings[i].limit - rings[i].used - rings[i].peak_excess
    if not left or left_here < left then index, left = i, left_here end
  end
  return index, left, reset_ms_of(rings[index], now)
end

-- When no window of the ring holds more than `most` permits any more, which one does now: ms since the
-- epoch. Where nothing is borrowed, `passed_before` and `passed_upto` of `expires_at` follow.
local function room_at(ring, most)
  if ring.last or ring.passed then return borrowed_room_at(ring, most) end
  return expires_at(ring, ring.used + ring.peak_excess - most, 1)
end

-- index, left, reset_ms, retry_ms of the refusal of one more call, which costs ring.cost in each ring.
-- A call needs as many permits to expire as it is above the limit. Each refusing ring gets
-- `passed_before` and `passed_upto`: the refusal is the same for every cost that needs more than
-- `passed_before` and at most `passed_upto`.
local function refusal(rings, now)
  local index, latest
  for i = 1, #rings do
    local ring = rings[i]
    local need = ring.used + ring.peak_excess + ring.cost - ring.limit
    if need > 0 then
      local at
      at, ring.passed_before, ring.passed_upto = room_at(ring, ring.limit - ring.cost)
      if at == ring.start + ring.span * ring.bucket_ms then ring.passed_upto = MAX_TOTAL end
      if not latest or at > latest then index, latest = i, at end
    end
  end
  local ring = rings[index]
  return index, ring.limit - ring.used - ring.peak_excess, reset_ms_of(ring, now), latest - now
end

-- True if any ring counts in a bucket that begins after now, as it does once the clock was set back.
local function any_ahead(rings, now)
  for i = 1, #rings do
    if rings[i].start > now then return true end
  end
  return false
end

-- `reply`, with the start of each ring's newest bucket appended if any of them is ahead of now: a
-- refund has to name the bucket.
local function append_bucket_starts(reply, rings, now)
  if any_ahead(rings, now) then
    for i = 1, #rings do reply[#reply + 1] = rings[i].start end
  end
  return reply
end
