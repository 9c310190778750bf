--- borrow: count a call now if every ring has room, else where room is promised soon, or refuse it.
--- KEYS   ring...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] now_ms max_wait_ms max_borrowed...
--- RETURN stamp left now_ms index reset_ms 0                 admitted, counted now
--- RETURN stamp left now_ms index reset_ms 0 bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN stamp left now_ms index reset_ms wait_ms bucket_start_ms... borrowed...   admitted, may proceed in wait_ms
--- RETURN stamp -1 now_ms index left reset_ms retry_ms 0     refused
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- A call that has to wait is counted in each ring in the bucket in which it will proceed; `borrowed` is 1
--- where that bucket has not begun. It is refused where it would wait for more than max_wait_ms or the
--- shortest window, or where a window would hold more than `max_borrowed` borrowed permits of a ring.
-- The positions of the arguments that follow those of the rings. The first max_borrowed follows MAX_WAIT.
local NOW, MAX_WAIT = #KEYS * 4 + 3, #KEYS * 4 + 4
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua

-- When the first coming bucket begins from which ring.cost permits may be borrowed; nil if there is none.
local function borrowable_at(ring)
  local most, most_borrowed = ring.limit - ring.cost, ring.max_borrowed - ring.cost
  if most < 0 or most_borrowed < 0 then return nil end
  load_buckets(ring)
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
  until number >= first and held <= most and promised <= most_borrowed or number >= first + span
  return number * ring.bucket_ms
end

-- True if a call at `moment` counts in the newest bucket, which has room for it.
local function is_newest_at(ring, moment)
  return ring.fits_now and moment < ring.start + ring.bucket_ms
end

-- The first moment at which the call can be counted in every ring; nil if there is none.
local function first_moment(rings)
  local moment, later = now, now
  repeat
    moment = later
    for i = 1, #rings do
      local ring = rings[i]
      if not is_newest_at(ring, moment) then
        ring.borrowable_at = ring.borrowable_at or borrowable_at(ring)
        if not ring.borrowable_at then return nil end
        later = math.max(later, ring.borrowable_at)
      end
    end
  until later == moment
  return moment
end

-- Count the call in the bucket of this number, which has not begun.
local function add_borrowed(ring, number)
  local call, key, borrowed = redis.call, ring.key, ring.borrowed
  borrowed[number] = (borrowed[number] or 0) + ring.cost
  update_peak(ring)
  if ring.outdated_fields[1] then call('HDEL', key, unpack(ring.outdated_fields)) end
  call('HSET', key, 'head', encode_head(ring), borrowed_field(ring, number),
    string.format('%.0f %.0f', number, borrowed[number]))
  call('PEXPIRE', key, time_to_live(ring))
end

local rings = parse_call(now, 3 + #KEYS)
local max_wait, fits = whole(ARGV[MAX_WAIT], 0, MAX_TOTAL), true
if not max_wait then rings = nil end
for i = 1, rings and #rings or 0 do
  local ring = rings[i]
  ring.max_borrowed = whole(ARGV[MAX_WAIT + i], 0, MAX_TOTAL)
  if not ring.max_borrowed then rings = nil break end
  ring.fits_now = ring.used + ring.peak_excess + ring.cost <= ring.limit
  fits = fits and ring.fits_now
  max_wait = math.min(max_wait, ring.span * ring.bucket_ms)
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local moment = fits and now or first_moment(rings)
if not moment or moment - now > max_wait then
  for i = 1, #rings do
    rotate(rings[i])
    redis.call('HINCRBY', rings[i].key, 'block', rings[i].cost)
  end
  local index, left, reset_ms, retry_ms = refusal(rings, now)
  if moment then retry_ms = math.min(retry_ms, moment - max_wait - now) end
  return {stamp, -1, now, index, left, reset_ms, retry_ms, 0}
end
local starts, borrowed = {}, {}
for i = 1, #rings do
  local ring = rings[i]
  local in_newest, number = is_newest_at(ring, moment), math.floor(moment / ring.bucket_ms)
  rotate(ring)
  if in_newest then add_used(ring, ring.cost) else add_borrowed(ring, number) end
  starts[i] = in_newest and ring.start or number * ring.bucket_ms
  borrowed[i] = in_newest and 0 or 1
end
local index, left, reset_ms = binding_ring(rings, now)
local reply = {stamp, math.max(0, left), now, index, reset_ms, moment - now}
if fits then return append_bucket_starts(reply, rings, now) end
for i = 1, #rings do reply[6 + i] = starts[i] end
for i = 1, #rings do reply[6 + #rings + i] = borrowed[i] end
return reply
