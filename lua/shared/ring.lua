-- A ring: the last `span` buckets of `width` ms of one resource, in one hash (fields: lua/README.md).
-- `used`, the running total of the window, makes a call's cost independent of the bucket count.
-- Buckets are numbered by their start, in widths since the epoch; slot = number % span.

local TALLIES = {'block', 'success', 'error', 'rt', 'min_rt'}

-- Pass of a closed bucket: it is stored as a plain number, or as 'pass block success error rt min_rt'.
local function pass(bucket)
  return bucket and tonumber(string.match(bucket, '^%d+')) or 0
end

-- The closed buckets first..last, by number. A few are fetched by name; many with one pass over
-- the hash, because each lookup by name is itself a walk in a compact hash.
local function closed_buckets(ring, first, last)
  local key, span, found = ring.key, ring.span, {}
  if last - first < 4 then
    for number = first, last do found[number] = redis.call('HGET', key, number % span) or nil end
    return found
  end
  local number_of = {}
  for number = first, last do number_of[number % span] = number end
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local number = number_of[tonumber(all[i])]
    if number then found[number] = all[i + 1] end
  end
  return found
end

-- Complete `ring` {key, width, span} with what the hash holds at `now`; writes nothing.
-- Time never goes back: the bucket is that of `now` or the newest one, whichever is later. A ring
-- that is ahead by more than its window is lost state (the clock was set back far): empty.
local function look(ring, now)
  local width, span = ring.width, ring.span
  local head = redis.call('HMGET', ring.key, 'start', 'used', 'closed')
  local start = tonumber(head[1])
  ring.start = now - now % width
  local steps = start and (ring.start - start) / width
  if not start or steps >= span or start - now > width * span then
    ring.fresh, ring.used, ring.closed = true, 0, 0
    return
  end
  ring.used, ring.closed = tonumber(head[2]), tonumber(head[3])
  if steps <= 0 then
    ring.start = start
    return
  end
  local newest = start / width
  ring.last, ring.last_pass, ring.expired = newest, ring.used - ring.closed, {}
  local first = newest + 1 - span
  for number, bucket in pairs(closed_buckets(ring, first, first + steps - 1)) do
    ring.used = ring.used - pass(bucket)
    ring.expired[#ring.expired + 1] = number % span
  end
  ring.closed = ring.used
end

-- Write what `look` saw: close the bucket that was newest into its slot, drop what has left the
-- window, open the bucket of now. `limit` ('100 leap') is kept for `stats`, which knows keys only.
-- Fields of every call are set first and never removed: in a compact hash, first is found first.
local function turn(ring, limit)
  local key = ring.key
  if ring.fresh then
    redis.call('DEL', key)
  elseif ring.last then
    for i = 1, #ring.expired do redis.call('HDEL', key, ring.expired[i]) end
    local bucket, tallies = ring.last_pass, redis.call('HMGET', key, unpack(TALLIES))
    if tallies[1] ~= '0' or tallies[2] then
      for i = 1, #TALLIES do bucket = bucket .. ' ' .. (tallies[i] or '0') end
      redis.call('HDEL', key, 'success', 'error', 'rt', 'min_rt')
    end
    if bucket ~= 0 then redis.call('HSET', key, ring.last % ring.span, bucket) end
  else
    return
  end
  redis.call('HSET', key, 'start', ring.start, 'used', ring.used, 'closed', ring.closed,
    'block', 0, 'room', '', 'limit', limit)
  redis.call('PEXPIRE', key, (ring.span + 1) * ring.width)
end

-- When the bucket leaves the window at which `need` permits are reached, counting from the oldest
-- bucket (step 1) or from the newest (step -1); with it, how many lie before that bucket on the way
-- and up to its end. Holds before and after `turn`.
local function leaves_at(ring, need, step)
  local newest = ring.start / ring.width
  local oldest = newest + 1 - ring.span
  if ring.fresh or (step < 0 and ring.used - ring.closed >= need) then
    return (newest + ring.span) * ring.width
  end
  local over, upto = 0, 0
  local from, last = oldest, newest
  if step < 0 then from, last = newest, oldest end
  while true do
    local to = from + 3 * step
    if from ~= oldest and from ~= newest or (last - to) * step < 0 then to = last end
    local found = closed_buckets(ring, math.min(from, to), math.max(from, to))
    if ring.last then
      for number = ring.last + 1, newest do found[number] = nil end
      found[ring.last] = ring.last_pass
    end
    found[newest] = ring.used - ring.closed
    for number = from, to, step do
      over, upto = upto, upto + pass(found[number])
      if upto >= need or number == last then return (number + ring.span) * ring.width, over, upto end
    end
    from = to + step
  end
end

-- The rings of this call, from KEYS and ARGV: for each key `amount limit width shape`. The shape is
-- '10' for ten buckets (leap), '10+1' for one more in the sum (strict). nil: not sent by us.
local function rings_at(now)
  local rings = {}
  for i = 1, #KEYS do
    local at = 4 * i - 2
    local buckets, more = string.match(ARGV[at + 3], '^(%d+)(%+?1?)$')
    local ring = {
      key = KEYS[i], amount = tonumber(ARGV[at]), limit = tonumber(ARGV[at + 1]),
      width = tonumber(ARGV[at + 2]), span = tonumber(buckets), bound = 'leap',
    }
    if more == '+1' then ring.span, ring.bound = ring.span + 1, 'strict' end
    for _, field in ipairs({'amount', 'limit', 'width', 'span'}) do
      local value = ring[field]
      if not (value and value >= 0 and value <= 1e15 and value % 1 == 0) then return nil end
    end
    if ring.width < 1 or ring.span < 1 or ring.span > 513 then return nil end
    look(ring, now)
    rings[i] = ring
  end
  return rings
end
