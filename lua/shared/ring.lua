-- A ring: the last `span` buckets of `bucket_ms` of one resource, in one hash (its fields:
-- lua/README.md). The running total `used` makes a call's cost independent of the number of buckets.
-- Buckets are numbered by their start divided by bucket_ms; slot = number % span. The slot of the
-- newest bucket may hold the bucket one ring earlier, which has expired, until the newest is closed.
--
-- In a script a ring is a table:
--   key permits limit bucket_ms span limit_field   its key and arguments (parse_rings)
--   start             of the newest bucket, ms; after read_ring, the one that `rotate` will open
--   used closed       permits in the window; the same without the newest bucket
--   is_empty          true if there is no hash, or nothing in it that counts now
--   head              the field `head` of the hash that an empty ring has all the same
--   has_refusal       true if `head` holds a stored refusal
--   closing           number of the bucket that `rotate` will close; nil if the newest one goes on
--   closing_passed    permits in that bucket
--   expired_slots     slots that `rotate` will delete
--   cost              permits of one call (parse_call, acquire)
--   passed_before passed_upto   for which costs a refusal holds (refusal, in shared/reply.lua)
-- One with permits that are borrowed from coming buckets (lua/README.md, "Borrowing") has besides:
--   last              number of the last bucket that is borrowed from; nil if there is none
--   peak_excess       what the fullest window that contains the newest bucket holds more than `used`
-- and once its buckets are loaded (load_buckets):
--   passed            permits of the closed buckets in the window, by number
--   borrowed          borrowed permits by number of their bucket: in the window, and of coming buckets
--   outdated_fields   names of the fields that hold borrowed permits of expired buckets
--   entered           slots and permits of the closed buckets that `rotate` will write for the first
--                     time: what was borrowed from buckets that nobody has opened

-- `head` of a ring with coming permits. Its first number is a start that no clock reaches, so the paths of
-- `acquire` that read a start or a stored refusal leave the ring to acquire/general.lua.
local BORROWED_HEAD = '99999999999999999999 %.0f -1 %.0f %.0f 0 0'
local BORROWED_PATTERN = '^9+ (%d+) %-1 (%d+) (%d+) 0 0$'

local function encode_head(ring)
  if not ring.last then return ring.start end
  return string.format(BORROWED_HEAD, ring.start, ring.peak_excess,
    ring.last - ring.start / ring.bucket_ms)
end

-- The field with the borrowed permits of a bucket. A window's buckets and those of the coming window have
-- different fields.
local function borrowed_field(ring, number)
  return 'b' .. string.format('%.0f', number % (2 * ring.span))
end

-- Complete `ring` with its buckets, as they will be once `rotate` has opened its newest bucket; writes
-- nothing. What is borrowed from a bucket up to the newest one has passed in it.
local function load_buckets(ring)
  local span, newest = ring.span, ring.start / ring.bucket_ms
  local stored, oldest = ring.closing or newest, newest + 1 - span
  local passed, borrowed, outdated, entered = {}, {}, {}, {}
  local all = ring.is_empty and {} or redis.call('HGETALL', ring.key)
  for i = 1, #all, 2 do
    local slot = tonumber(all[i])
    if slot then
      local number = stored - (stored - slot) % span
      if number ~= stored and number >= oldest then passed[number] = passed_in(all[i + 1]) end
    elseif string.find(all[i], '^b%d+$') then
      local number, permits = string.match(all[i + 1], '^(%d+) (%d+)$')
      number, permits = number - 0, permits - 0
      if number < oldest then
        outdated[#outdated + 1] = all[i]
      else
        borrowed[number] = permits
        if number > stored and number < newest then
          passed[number] = permits
          entered[#entered + 1], entered[#entered + 2] = number % span, permits
        end
      end
    end
  end
  if ring.closing and ring.closing >= oldest then passed[ring.closing] = ring.closing_passed end
  ring.passed, ring.borrowed, ring.outdated_fields, ring.entered = passed, borrowed, outdated, entered
end

-- Set `last` and `peak_excess` of a ring whose buckets are loaded.
local function update_peak(ring)
  local newest, excess = ring.start / ring.bucket_ms, 0
  ring.last, ring.peak_excess = nil, 0
  for number in pairs(ring.borrowed) do
    if number > newest and number > (ring.last or 0) then ring.last = number end
  end
  for number = newest + 1, math.min(ring.last or newest, newest + ring.span - 1) do
    excess = excess + (ring.borrowed[number] or 0) - (ring.passed[number - ring.span] or 0)
    ring.peak_excess = math.max(ring.peak_excess, excess)
  end
end

-- The part of `read_ring` for a ring with coming permits whose newest bucket is over: `closing` is set.
local function read_borrowed_ring(ring)
  load_buckets(ring)
  local newest, slots = ring.start / ring.bucket_ms, {unpack(ring.outdated_fields)}
  for number = ring.closing + 1 - ring.span, math.min(ring.closing, newest - ring.span) do
    slots[#slots + 1] = number % ring.span
  end
  ring.expired_slots, ring.closed = slots, 0
  for _, permits in pairs(ring.passed) do ring.closed = ring.closed + permits end
  ring.used = ring.closed + (ring.borrowed[newest] or 0)
  update_peak(ring)
end

-- The permits of a bucket of any number, of a ring whose buckets are loaded.
local function permits_at(ring, number)
  local newest = ring.start / ring.bucket_ms
  if number > newest then return ring.borrowed[number] or 0 end
  if number == newest then return ring.used - ring.closed end
  return ring.passed[number] or 0
end

-- When there is room for a plain call, ms since the epoch: the beginning of the first bucket from which on
-- no window holds more than `most` permits. For a ring with coming permits, or whose buckets are loaded.
local function borrowed_room_at(ring, most)
  if not ring.passed then load_buckets(ring) end
  local newest, held = ring.start / ring.bucket_ms, ring.used
  local room = newest + 1
  for number = newest + 1, (ring.last or newest) + ring.span - 1 do
    held = held + permits_at(ring, number) - permits_at(ring, number - ring.span)
    if held > most then room = number + 1 end
  end
  return room * ring.bucket_ms
end

-- When the last bucket with permits expires, ms since the epoch. For such a ring as well.
local function borrowed_empty_at(ring)
  local newest = ring.start / ring.bucket_ms
  local last = ring.last or newest
  while last > newest - ring.span and not ring.last and permits_at(ring, last) == 0 do last = last - 1 end
  return (last + ring.span) * ring.bucket_ms
end

-- Write `head` again after a change of closed buckets or of borrowed permits, which the hash holds already.
local function rewrite_head(ring)
  ring.closing = nil
  load_buckets(ring)
  update_peak(ring)
  redis.call('HSET', ring.key, 'head', encode_head(ring))
end

-- The closed buckets first..last, by number. A few are fetched by name; more of them by reading the
-- whole hash once, because in a compact hash each lookup by name walks through its fields.
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

-- Complete `ring` with what its hash holds at `now`; writes nothing.
-- The newest bucket is that of `now` or the stored one, whichever is later. A ring that is ahead of
-- now by more than its window (the clock was set back far) is treated as empty.
local function read_ring(ring, now)
  local bucket_ms, span = ring.bucket_ms, ring.span
  local values = redis.call('HMGET', ring.key, 'head', 'used', 'closed')
  local head = values[1]
  local start, ahead = tonumber(head), nil
  if head and not start then start, ring.peak_excess, ahead = string.match(head, BORROWED_PATTERN) end
  if ahead then
    start, ring.peak_excess, ahead = start - 0, ring.peak_excess - 0, ahead - 0
  elseif head and not start then
    ring.peak_excess = 0
    -- Where `head` is neither a start nor a stored refusal, this is not a ring of distwindow. Then
    -- `nil - 0` ends the script with an error, rather than admitting without a limit.
    ring.has_refusal, start = true, string.match(head, '^(%d+) %d+ [%d -]+$') - 0
  end
  ring.start = now - now % bucket_ms
  local steps = start and (ring.start - start) / bucket_ms
  if not start or steps - (ahead or 0) >= span or start - now > bucket_ms * span then
    ring.is_empty, ring.head, ring.used, ring.closed, ring.peak_excess = true, head, 0, 0, 0
    return
  end
  ring.used, ring.closed = values[2] - 0, values[3] - 0
  local newest = start / bucket_ms
  if steps <= 0 then
    ring.start, ring.last = start, ahead and newest + ahead
    return
  end
  ring.closing, ring.closing_passed, ring.expired_slots = newest, ring.used - ring.closed, {}
  if ahead then return read_borrowed_ring(ring) end
  local first = newest + 1 - span
  for number, bucket in pairs(closed_buckets(ring, first, first + steps - 1)) do
    ring.used = ring.used - passed_in(bucket)
    ring.expired_slots[#ring.expired_slots + 1] = number % span
  end
  ring.closed = ring.used
end

-- The time to live, ms, of a ring whose newest bucket begins: until the next bucket that renews it, and its
-- window after it, are over, and the windows of coming buckets, too.
local function time_to_live(ring)
  local newest, span = ring.start / ring.bucket_ms, ring.span
  local buckets = math.floor(span / 4) + 1 + span + (ring.last or newest) - newest
  return buckets * ring.bucket_ms + math.max(0, ring.start - now)
end

-- Delete all fields but the six that `rotate` sets: those of buckets have digits in their names. The key
-- itself is not deleted (lua/README.md, "Migrating slots").
local function delete_buckets(key)
  local all, fields = redis.call('HGETALL', key), {}
  for i = 1, #all, 2 do
    if string.find(all[i], '%d') then fields[#fields + 1] = all[i] end
  end
  if fields[1] then redis.call('HDEL', key, unpack(fields)) end
end

-- Write what `read_ring` has found: close the bucket that was the newest into its slot, delete what
-- has expired, open the bucket of now. acquire/rotate.lua does the same for one ring.
-- The fields of every call are set first, in this order, and never removed: in a compact hash Redis
-- finds the first fields first.
local function rotate(ring)
  local key = ring.key
  if ring.is_empty then
    -- Do not HDEL where there is nothing to delete: once a script has written anything, and an HDEL counts
    -- as a write, Redis lets it write beyond maxmemory.
    if ring.head and redis.call('HLEN', key) ~= 6 then delete_buckets(key) end
  elseif ring.closing then
    if ring.expired_slots[1] then redis.call('HDEL', key, unpack(ring.expired_slots)) end
    if ring.closing + ring.span > ring.start / ring.bucket_ms then
      local values = redis.call('HMGET', key, 'block', 'finished')
      redis.call('HSET', key, ring.closing % ring.span,
        encode_bucket(ring.closing_passed, values[1], values[2]))
    end
    if ring.entered and ring.entered[1] then redis.call('HSET', key, unpack(ring.entered)) end
  else
    return
  end
  local number, renewal = ring.start / ring.bucket_ms, math.floor(ring.span / 4) + 1
  redis.call('HSET', key, 'head', encode_head(ring), 'used', ring.used, 'closed', ring.closed,
    'block', '0', 'finished', '0', 'limit', ring.limit_field)
  if ring.is_empty or ring.passed or number % renewal < number - ring.closing then
    redis.call('PEXPIRE', key, time_to_live(ring))
  end
  ring.has_refusal = false
end

-- Add `permits` (negative: take them out) to the total. A stored refusal is valid for an unchanged
-- total only, so the plain start replaces it.
local function add_used(ring, permits)
  if ring.has_refusal then redis.call('HSET', ring.key, 'head', ring.start) end
  ring.used = redis.call('HINCRBY', ring.key, 'used', permits)
end

-- Adds up buckets from the oldest (step 1) or the newest (step -1) until they hold `need` permits.
-- Returns when the last of these buckets expires, in ms since the epoch, and how many permits they
-- hold without and with that one; nothing but the time where no bucket had to be read. The result is
-- the same before and after `rotate`.
local function expires_at(ring, need, step)
  local newest = ring.start / ring.bucket_ms
  local oldest = newest + 1 - ring.span
  if ring.is_empty or (step < 0 and ring.used - ring.closed >= need) then
    return (newest + ring.span) * ring.bucket_ms
  end
  local passed_before, passed_upto = 0, 0
  local from, last = oldest, newest
  if step < 0 then from, last = newest, oldest end
  while true do
    local to = from + 3 * step
    if from ~= oldest and from ~= newest or (last - to) * step < 0 then to = last end
    local found = closed_buckets(ring, math.min(from, to), math.max(from, to))
    if ring.closing then
      for number = ring.closing + 1, newest do found[number] = nil end
      found[ring.closing] = ring.closing_passed
    end
    found[newest] = ring.used - ring.closed
    for number = from, to, step do
      passed_before, passed_upto = passed_upto, passed_upto + passed_in(found[number])
      if passed_upto >= need or number == last then
        return (number + ring.span) * ring.bucket_ms, passed_before, passed_upto
      end
    end
    from = to + step
  end
end

-- The rings of this call, read at `now`: the first `ring_count` keys (nil: all keys). At most
-- `max_extra` arguments may follow those of the rings. nil if the arguments are malformed.
local function parse_rings(now, max_extra, ring_count)
  local rings, seen = {}, {}
  ring_count = ring_count or #KEYS
  if #ARGV > ring_count * 4 + 1 + max_extra or not (now >= 0 and now <= MAX_TOTAL)
    or client_now and string.find(client_now, '%D') then
    return nil
  end
  for i = 1, ring_count do
    local key = KEYS[i]
    local permits, limit, bucket_ms, span, limit_field = ring_arguments(i)
    if not permits or seen[key] then return nil end
    local ring = {key = key, permits = permits, limit = limit, bucket_ms = bucket_ms, span = span,
      limit_field = limit_field, peak_excess = 0}
    read_ring(ring, now)
    rings[i], seen[key] = ring, true
  end
  return rings[1] and rings
end

-- Do as parse_rings, for one call, whose cost is at least 1 in each ring.
local function parse_call(now, max_extra, ring_count)
  local rings = parse_rings(now, max_extra, ring_count)
  for i = 1, rings and #rings or 0 do
    rings[i].cost = rings[i].permits
    if rings[i].cost < 1 then return nil end
  end
  return rings
end

-- What one more call leaves, of the ring with the fewest permits; negative where there is no room for it.
local function left_after(rings)
  local fewest = MAX_TOTAL
  for i = 1, #rings do
    local ring = rings[i]
    fewest = math.min(fewest, ring.limit - ring.used - ring.peak_excess - ring.cost)
  end
  return fewest
end
