-- What priority calls have taken of a ring, and what plain calls have asked of it: the hash of the ring's
-- key and `:priority` (lua/README.md, "Priority records"). It mirrors distwindow/core/priority_record.py,
-- which has the terms. In a script such a ring has beside the fields of shared/ring.lua and
-- shared/reservations.lua:
--   record            the key of this hash
--   taken refused     permits of priority calls in the newest bucket: counted while there was room; refused
--   outdated_record   names of the fields of its record that count no more
--   period            number of the period of the newest bucket
--   asked asked_before    the most that plain calls asked for, in this period and the one before
--   held              priority permits by number of their bucket: in the window, and of coming buckets
--   held_now fullest  in the window, and in the fullest one in which a call in the newest bucket counts

-- Permits that passed, were refused and were borrowed in each bucket, by number, as the hash of a ring has
-- them; and the number of the bucket that is the newest there, nil where there is no hash.
local function stored_buckets(ring)
  local span, head = ring.span, ring.head
  local passed, blocked, borrowed, stored = {}, {}, {}, ring.closing or ring.start / ring.bucket_ms
  if ring.is_empty then
    if not head then return passed, blocked, borrowed, nil end
    local start = tonumber(head) or string.match(head, RESERVED_PATTERN) or string.match(head, '^%d+')
    stored = start / ring.bucket_ms
  end
  local all = redis.call('HGETALL', ring.key)
  for i = 1, #all, 2 do
    local name, value = all[i], all[i + 1]
    local slot = tonumber(name)
    if slot then
      local number = stored - (stored - slot) % span
      if number ~= stored then
        passed[number] = tonumber(value)
        if not passed[number] then
          passed[number], blocked[number] = passed_in(value), string.match(value, '^%d+ (%d+)')
        end
      end
    elseif name == 'used' then
      passed[stored] = (passed[stored] or 0) + value
    elseif name == 'closed' then
      passed[stored] = (passed[stored] or 0) - value
    elseif name == 'block' then
      blocked[stored] = value
    elseif string.find(name, '^b%d+$') then
      local number, permits = string.match(value, '^(%d+) (%d+)$')
      borrowed[number - 0] = permits - 0
    end
  end
  for number, permits in pairs(borrowed) do
    if number > stored then passed[number] = permits end
  end
  return passed, blocked, borrowed, stored
end

-- Complete `ring` with its record, and with what plain calls have asked for up to now; writes nothing.
local function load_priority(ring, record)
  load_buckets(ring)
  local span, newest = ring.span, ring.start / ring.bucket_ms
  local passed, blocked, borrowed, stored = stored_buckets(ring)
  local taken, refused, outdated, all = {}, {}, {}, redis.call('HGETALL', record)
  local period, asked, asked_before = 0, 0, 0
  for i = 1, #all, 2 do
    local first, second, third = string.match(all[i + 1], '^(%d+) (%d+) (%d+)$')
    first, second, third = first - 0, second - 0, third - 0
    if all[i] == 'asked' then
      period, asked, asked_before = first, second, third
    else
      taken[first], refused[first] = second, third
      if first <= newest - span or first > newest then outdated[#outdated + 1] = all[i] end
    end
  end
  local function held_in(number)
    local of_priority = (borrowed[number] or 0) + (taken[number] or 0)
    return of_priority > 0 and math.min(passed[number] or 0, of_priority) or 0
  end
  -- Keep what plain calls have asked for in the window that ends with bucket `last`, where it is contended.
  local function observe(last)
    local now_asked, any_refused = 0, false
    for number = last + 1 - span, last do
      local of_plain = (passed[number] or 0) - held_in(number)
      local refused_here = (blocked[number] or 0) - (refused[number] or 0)
      now_asked = now_asked + of_plain
      if refused_here > 0 then
        now_asked, any_refused = now_asked + of_plain + refused_here, true
      end
    end
    local of_last = math.floor(last / span)
    if of_last ~= period then
      asked, asked_before, period = 0, of_last == period + 1 and asked or 0, of_last
    end
    if any_refused or asked > 0 or asked_before > 0 then
      asked = math.max(asked, math.min(now_asked, MAX_TOTAL))
    end
  end
  -- The calls after the last priority call in the bucket that `rotate` will close are seen here.
  if stored and stored ~= newest then observe(stored) end
  observe(newest)
  ring.record, ring.taken, ring.refused = record, taken[newest] or 0, refused[newest] or 0
  ring.period, ring.asked, ring.asked_before = period, asked, asked_before
  if asked == 0 and asked_before == 0 and all[1] then outdated[#outdated + 1] = 'asked' end
  ring.outdated_record, ring.held, ring.held_now = outdated, {}, 0
  for number = newest + 1 - span, ring.last or newest do
    ring.held[number] = held_in(number)
    if number <= newest then ring.held_now = ring.held_now + ring.held[number] end
  end
  local held = ring.held_now
  ring.fullest = held
  for number = newest + 1, math.min(ring.last or newest, newest + span - 1) do
    held = held + ring.held[number] - ring.held[number - span]
    ring.fullest = math.max(ring.fullest, held)
  end
end

-- How much priority calls may hold in a window at `moment`, if nobody calls until then.
local function priority_cap(ring, moment)
  local number = math.max(ring.start, moment - moment % ring.bucket_ms) / ring.bucket_ms
  local period, reserve = math.floor(number / ring.span), 0
  if period == ring.period then
    reserve = math.max(ring.asked, ring.asked_before)
  elseif period == ring.period + 1 then
    reserve = ring.asked
  end
  return math.max(math.min(ring.limit, ring.max_borrowed), ring.limit - reserve)
end

-- `moments`, with those appended at which the cap of the ring rises, if nobody calls until then.
local function append_cap_changes(ring, moments, now)
  local cap = priority_cap(ring, now)
  for later = 1, 2 do
    local moment = (ring.period + later) * ring.span * ring.bucket_ms
    local risen = priority_cap(ring, moment)
    if risen > cap then cap, moments[#moments + 1] = risen, moment end
  end
  return moments
end

-- From when on the priority permits leave room for the call in the newest bucket, if nobody calls until
-- then; `now` if they do not keep it out.
local function priority_room_at(ring, now)
  local newest, span, held, first = ring.start / ring.bucket_ms, ring.span, ring.held, nil
  for _, moment in ipairs(append_cap_changes(ring, {now}, now)) do
    local most = priority_cap(ring, moment) - ring.cost
    if most >= 0 then
      local number, sum, room = newest, ring.held_now, 0
      while true do
        if sum > most then room = number + 1 end
        number = number + 1
        if number > (ring.last or newest) + span then break end
        sum = sum + (held[number] or 0) - (held[number - span] or 0)
      end
      moment = math.max(moment, now, room * ring.bucket_ms)
      first = math.min(first or moment, moment)
    end
  end
  return first or now
end

-- Count permits of the call in the newest bucket of a ring that has been rotated, and write the record.
local function write_priority(ring, taken, refused)
  local newest, call = ring.start / ring.bucket_ms, redis.call
  if ring.outdated_record[1] then call('HDEL', ring.record, unpack(ring.outdated_record)) end
  local any = ring.asked > 0 or ring.asked_before > 0
  if any then
    call('HSET', ring.record, 'asked',
      string.format('%.0f %.0f %.0f', ring.period, ring.asked, ring.asked_before))
  end
  if taken + refused > 0 then
    call('HSET', ring.record, string.format('%.0f', newest % ring.span),
      string.format('%.0f %.0f %.0f', newest, ring.taken + taken, ring.refused + refused))
    any = true
  end
  if any then
    call('PEXPIRE', ring.record,
      string.format('%.0f', (newest + 2 * ring.span + 1) * ring.bucket_ms - now))
  end
end
