-- The virtual line of a ring: who was refused takes a place in it, and is told a turn. The
-- specification, which also explains the words, is distwindow/waiting/memory.py; what is computed
-- here in which order has to be the same there, because all of it is in doubles.
--
-- In a script such a ring has beside the fields of shared/ring.lua:
--   line_key    its hash with the line
--   window_ms   the time that is summed
--   tail        the last turn, us; 0 where there is none
local MAX_LINE_WINDOWS = 1000

-- Complete `ring` with its line at `now`; writes nothing.
local function read_line(ring, line_key, now)
  local window_ms, tail = ring.span * ring.bucket_ms, 0
  local values = redis.call('HMGET', line_key, 'tail', 'seen')
  if values[1] and values[2] then
    local age = now - values[2]
    if age >= -window_ms and age <= 2 * window_ms then tail = values[1] - 0 end
  end
  ring.line_key, ring.window_ms, ring.tail = line_key, window_ms, tail
end

-- The time in which the limit admits ring.cost, us.
local function spacing_us(ring)
  return math.ceil(ring.cost * (ring.window_ms * 1000) / ring.limit)
end

-- Take the place at the end of the line, for a caller that has room at `room_at_ms`. Returns its turn,
-- ms since the epoch.
local function take_turn(ring, room_at_ms, now)
  local longest = now * 1000 + MAX_LINE_WINDOWS * (ring.window_ms * 1000)
  ring.tail = math.min(math.max(room_at_ms * 1000, ring.tail + spacing_us(ring)), longest)
  return math.ceil(ring.tail / 1000)
end

-- When a caller that was refused although it holds the turn `held` (0: it holds none) should ask
-- again, ms since the epoch; nil if it has to take a new place.
local function keep_turn(ring, held, room_at_ms, now)
  if held >= room_at_ms then return held end
  if held > 0 and room_at_ms - now <= ring.bucket_ms then return room_at_ms end
end

-- The permits for which those wait whose turns come after now, and after that of the caller.
local function queued_permits(ring, held, now)
  local begin = math.max(now * 1000, held * 1000)
  return math.floor(math.max(0, ring.tail - begin) * ring.limit / (ring.window_ms * 1000) + 0.5)
end

-- Write the line of a ring, if its last turn is still to come, and have it expire when nobody asks.
local function write_line(ring, now)
  if ring.tail <= now * 1000 then return end
  redis.call('HSET', ring.line_key, 'tail', string.format('%.0f', ring.tail),
    'seen', string.format('%.0f', now))
  redis.call('PEXPIRE', ring.line_key, string.format('%.0f', 2 * ring.window_ms))
end
