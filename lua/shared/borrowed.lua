-- Permits of a ring that are borrowed from coming buckets (lua/README.md, "Borrowing"). In a script such a
-- ring has beside the fields of shared/ring.lua:
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
