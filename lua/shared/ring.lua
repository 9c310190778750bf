-- A ring: the last `span` buckets of `width` ms of one resource, in one hash (fields: lua/README.md).
-- `used`, the running total of the window, makes a call's cost independent of the bucket count.
-- Buckets are numbered by their start, in widths since the epoch; slot = number % span. The slot of
-- the newest bucket is not its own: what lies there has left the window and waits to be overwritten.

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
  if head[1] and not start then
    -- Neither a start nor a note: no ring of ours, and an error rather than a window without end.
    ring.noted, start = true, string.match(head[1], '^(%d+) %d+ [%d -]+$') - 0
  end
  ring.start = now - now % width
  local steps = start and (ring.start - start) / width
  if not start or steps >= span or start - now > width * span then
    ring.fresh, ring.lost, ring.used, ring.closed = true, head[1], 0, 0
    return
  end
  ring.used, ring.closed = head[2] - 0, head[3] - 0
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
-- window, open the bucket of now. The limit is kept for `stats`, which knows keys only.
-- Fields of every call are set first and never removed: in a compact hash, first is found first.
local function turn(ring)
  local key = ring.key
  if ring.fresh then
    -- Not in vain: once a script has written anything, Redis lets it write beyond its maxmemory.
    if ring.lost then redis.call('DEL', key) end
  elseif ring.last then
    if ring.expired[1] then redis.call('HDEL', key, unpack(ring.expired)) end
    local head = redis.call('HMGET', key, 'block', 'done')
    redis.call('HSET', key, ring.last % ring.span, closing(ring.last_pass, head[1], head[2]))
  else
    return
  end
  redis.call('HSET', key, 'start', ring.start, 'used', ring.used, 'closed', ring.closed,
    'block', '0', 'done', '0', 'limit', ring.told)
  redis.call('PEXPIRE', key, (ring.span + 1) * ring.width)
  ring.noted = false
end

-- Count `amount` in (or, negative, out of) the total. A refusal's note in `start` holds for an
-- unchanged total only.
local function count(ring, amount)
  if ring.noted then redis.call('HSET', ring.key, 'start', ring.start) end
  ring.used = redis.call('HINCRBY', ring.key, 'used', amount)
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

-- The rings of this call, which are its first `many` keys (all, if not said); `more` arguments at
-- most follow theirs. nil: not sent by us.
local function rings_at(now, more, many)
  local rings, seen = {}, {}
  many = many or #KEYS
  if #ARGV > many * 4 + 1 + more or not (now >= 0 and now <= MOST)
    or given and string.find(given, '%D') then
    return nil
  end
  for i = 1, many do
    local key = KEYS[i]
    local amount, limit, width, span, told = arguments(i)
    if not amount or seen[key] then return nil end
    local ring = {key = key, amount = amount, limit = limit, width = width, span = span, told = told}
    look(ring, now)
    rings[i], seen[key] = ring, true
  end
  return rings[1] and rings
end
