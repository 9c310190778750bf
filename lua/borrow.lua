--- borrow: count a call now if every ring has room, else where room is promised soon, or refuse it.
--- KEYS   ring... priority...
--- ARGV   guard (permits limit bucket_ms shape)... [calls] now_ms max_wait_ms max_borrowed...
--- RETURN guard left now_ms index reset_ms 0                 admitted, counted now
--- RETURN guard left now_ms index reset_ms 0 bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN guard left now_ms index reset_ms wait_ms bucket_start_ms... borrowed...   admitted, may proceed in wait_ms
--- RETURN guard -1 now_ms index left reset_ms retry_ms 0     refused
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
--- A call that has to wait is counted in each ring in the bucket in which it will proceed; `borrowed` is 1
--- where that bucket has not begun. It is refused where it would wait for more than max_wait_ms or the
--- shortest window, where a window would hold more than `max_borrowed` borrowed permits of a ring, or more
--- permits of priority calls than plain calls leave of the limit. `priority` of a ring: the hash
--- `<ring>:priority`, with what priority calls have taken, and what plain calls have asked for.
local ring_count = #KEYS / 2
-- The positions of the arguments that follow those of the rings. The first max_borrowed follows MAX_WAIT.
local NOW, MAX_WAIT = ring_count * 4 + 3, ring_count * 4 + 4
local guard, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/reservations.lua
--@include shared/ring.lua
--@include shared/reply.lua
--@include shared/priority.lua

-- True for a whole number in plain digits, of at most MAX_TOTAL.
local function is_number(word)
  return word and string.find(word, '^%d+$') and word - 0 <= MAX_TOTAL
end

-- True if the newest bucket has room for the call under the cap of `moment`.
local function fits(ring, moment)
  return ring.used + ring.peak_excess + ring.cost <= ring.limit
    and ring.fullest + ring.cost <= priority_cap(ring, moment)
end

-- When the first coming bucket begins from which ring.cost permits may be borrowed under the cap of
-- `moment`; nil if there is none.
local function borrowable_at(ring, moment)
  local most, most_borrowed = ring.limit - ring.cost, ring.max_borrowed - ring.cost
  if most < 0 or most_borrowed < 0 then return nil end
  local most_held, priority, priority_held = priority_cap(ring, moment) - ring.cost, ring.held, ring.held_now
  local newest, span, held, promised = ring.start / ring.bucket_ms, ring.span, ring.used, 0
  for number, permits in pairs(ring.borrowed) do
    if number <= newest then promised = promised + permits end
  end
  local number, first = newest, math.max(newest + 1, ring.last or 0)
  -- (Where all buckets have expired, the first condition is true. The second ends the loop also for a
  -- hash whose totals are not those of its buckets.)
  repeat
    number = number + 1
    held = held + permits_at(ring, number) - permits_at(ring, number - span)
    promised = promised + (ring.borrowed[number] or 0) - (ring.borrowed[number - span] or 0)
    priority_held = priority_held + (priority[number] or 0) - (priority[number - span] or 0)
  until number >= first and held <= most and promised <= most_borrowed and priority_held <= most_held
    or number >= first + span
  return number * ring.bucket_ms
end

-- The first moment at which a call of `asked_at` can be counted in every ring, if nobody calls until then;
-- nil if there is none.
local function first_moment(rings, asked_at)
  local moment, later, borrowable = asked_at, asked_at, {}
  repeat
    moment = later
    for i = 1, #rings do
      local ring = rings[i]
      if not (moment < ring.start + ring.bucket_ms and fits(ring, asked_at)) then
        borrowable[i] = borrowable[i] or borrowable_at(ring, asked_at)
        if not borrowable[i] then return nil end
        later = math.max(later, borrowable[i])
      end
    end
  until later == moment
  return moment
end

-- index, left, reset_ms, retry_ms of the refusal of the call: of the ring that has room last, and the time
-- until the call would be admitted if nobody called until then.
local function priority_refusal(rings, max_wait)
  local index, retry_at
  for i = 1, #rings do
    local ring = rings[i]
    if not ring.fits_now then
      local room = priority_room_at(ring, now)
      if ring.used + ring.peak_excess + ring.cost > ring.limit then
        room = math.max(room, (room_at(ring, ring.limit - ring.cost)))
      end
      if not retry_at or room > retry_at then index, retry_at = i, room end
    end
  end
  -- What may be borrowed is more once the cap of a ring has risen.
  local moments = {now}
  for i = 1, #rings do append_cap_changes(rings[i], moments, now) end
  for i = 1, #moments do
    local at = first_moment(rings, math.max(now, moments[i]))
    if at then retry_at = math.min(retry_at, math.max(moments[i], at - max_wait)) end
  end
  local ring = rings[index]
  local left = math.min(ring.limit - ring.used - ring.peak_excess, priority_cap(ring, now) - ring.fullest)
  return index, left, reset_ms_of(ring, now), retry_at - now
end

-- Reserve the call in the bucket of this number, which has not begun.
local function reserve(ring, number)
  local call, key, borrowed = redis.call, ring.key, ring.borrowed
  borrowed[number] = (borrowed[number] or 0) + ring.cost
  update_peak(ring)
  if ring.outdated_fields[1] then call('HDEL', key, unpack(ring.outdated_fields)) end
  call('HSET', key, 'head', encode_head(ring), borrowed_field(ring, number),
    string.format('%.0f %.0f', number, borrowed[number]))
  call('PEXPIRE', key, time_to_live(ring))
end

local rings = ring_count % 1 == 0 and parse_rings(now, 3 + ring_count, ring_count)
if not is_number(ARGV[MAX_WAIT]) then rings = nil end
local max_wait, all_fit = rings and ARGV[MAX_WAIT] - 0, true
for i = 1, rings and #rings or 0 do
  local ring, max_borrowed = rings[i], ARGV[MAX_WAIT + i]
  ring.cost = ring.permits
  if ring.cost < 1 or not is_number(max_borrowed) or KEYS[ring_count + i] ~= ring.key .. ':priority' then
    rings = nil
    break
  end
  ring.max_borrowed = max_borrowed - 0
  load_priority(ring, KEYS[ring_count + i])
  ring.fits_now = fits(ring, now)
  all_fit = all_fit and ring.fits_now
  max_wait = math.min(max_wait, ring.span * ring.bucket_ms)
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local moment = all_fit and now or first_moment(rings, now)
if not moment or moment - now > max_wait then
  local index, left, reset_ms, retry_ms = priority_refusal(rings, max_wait)
  for i = 1, #rings do
    rotate(rings[i])
    redis.call('HINCRBY', rings[i].key, 'block', rings[i].cost)
    write_priority(rings[i], 0, rings[i].cost)
  end
  return {guard, -1, now, index, left, reset_ms, retry_ms, 0}
end
local starts, borrowed = {}, {}
for i = 1, #rings do
  local ring, number = rings[i], math.floor(moment / rings[i].bucket_ms)
  local in_newest = ring.fits_now and moment < ring.start + ring.bucket_ms
  rotate(ring)
  if in_newest then add_used(ring, ring.cost) else reserve(ring, number) end
  write_priority(ring, in_newest and ring.cost or 0, 0)
  starts[i] = in_newest and ring.start or number * ring.bucket_ms
  borrowed[i] = in_newest and 0 or 1
end
local index, left, reset_ms = binding_ring(rings, now)
local reply = {guard, math.max(0, left), now, index, reset_ms, moment - now}
if all_fit then return append_bucket_starts(reply, rings, now) end
for i = 1, #rings do reply[6 + i] = starts[i] end
for i = 1, #rings do reply[6 + #rings + i] = borrowed[i] end
return reply
