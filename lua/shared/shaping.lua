-- Pacing and warm-up of a limit. The specification, which also explains the words, is
-- distwindow/shaping/shaping.py; what is done here in which order has to be the same there, because the
-- rate of a cold limit is computed in doubles.
--
-- A ring of a paced or warming limit has a table `shaping`, and its state in the hash ring.shaping.key:
--   max_wait_us         how long this call may wait; nil if the limit is not paced
--   warmup_ms           nil if it does not warm up; otherwise also
--     period_ms warning max_tokens slope cold_rate refill_below forget_ms
--   interval_ms         of the limit
--   moment rest         the promised moment, us, and its remainder in parts 1 / limit of one us
--   tokens filled passed   of the warm-up
--   is_refilled         true if that period has begun since the last call
--   is_dropped          true if the state in the hash is far ahead of now, and counts no more
--   words               the limit and its terms as text, which `stats` reads
--   stored_words        the same as it is in the hash
local MIN_PERIOD_MS, MAX_SHAPED_MS, MAX_SHAPED_AMOUNT = 1000, 86400000, 1e7
local MAX_COLD_FACTOR, MAX_RETRY_ROUNDS = 100, 8

-- The next greater double of a positive x. Redis has Lua 5.1, which has no function for it; this sum
-- is rounded to it (Rump, Zimmermann, Boldo and Melquiond, 2009).
local function next_up(x)
  local unit = 2 ^ -53
  return x + x * (unit * (1 + 2 * unit))
end

-- The terms of a ring from its three arguments at ARGV[at]; nil if they are malformed, false if the
-- limit is neither paced nor warms up. The caller can wait for at most `cap_ms`.
local function parse_terms(ring, at, cap_ms)
  local max_wait, warmup, cold_factor = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if max_wait == '' and warmup == '' and cold_factor == '' then return false end
  local strict = string.find(ring.limit_field, '-', 1, true) and 1 or 0
  local limit, interval_ms = ring.limit, ring.bucket_ms * (ring.span - strict)
  local terms = {interval_ms = interval_ms, longest_step_ms = interval_ms}
  if limit < 1 or limit > MAX_SHAPED_AMOUNT or ring.permits > limit then return nil end
  if max_wait ~= '' then
    max_wait = whole(max_wait, 0, MAX_SHAPED_MS)
    if not max_wait then return nil end
    terms.max_wait_us = math.min(max_wait, cap_ms) * 1000
  end
  if warmup ~= '' or cold_factor ~= '' then
    local warmup_ms, factor = whole(warmup, 1, MAX_SHAPED_MS), whole(cold_factor, 2, MAX_COLD_FACTOR)
    terms.period_ms = math.max(MIN_PERIOD_MS, interval_ms)
    if not warmup_ms or not factor or warmup_ms < terms.period_ms then return nil end
    local at_warning = math.floor(math.floor(warmup_ms * limit / interval_ms) / (factor - 1))
    local above = math.floor(2 * warmup_ms * limit / (interval_ms * (1 + factor)))
    if at_warning < 1 or above < 1 then return nil end
    terms.warmup_ms = warmup_ms
    terms.warning = at_warning * interval_ms
    terms.max_tokens = (at_warning + above) * interval_ms
    terms.slope, terms.cold_rate = (factor - 1) / limit / above, limit / factor
    -- A period that is not exactly one window may hold one window less than it could.
    local windows = terms.period_ms / (ring.bucket_ms * ring.span)
    if windows ~= 1 then windows = math.max(0, math.floor(windows) - 1) end
    terms.refill_below = math.floor(limit / factor) * windows
    terms.forget_ms = 2 * (warmup_ms + terms.period_ms)
    terms.longest_step_ms = interval_ms * factor
  end
  terms.words = ring.limit_field .. ',' .. ARGV[at] .. ',' .. warmup .. ',' .. cold_factor
  return terms
end

-- The tokens, the period of their last refill and the permits passed in it, at `at`.
local function refilled(ring, at)
  local terms = ring.shaping
  local period = at - at % terms.period_ms
  local filled = terms.filled
  if not filled or period - filled > terms.forget_ms then return terms.max_tokens, period, 0 end
  local tokens = math.min(terms.tokens, terms.max_tokens)
  if period <= filled then return tokens, filled, terms.passed end
  local passed_before = period - filled == terms.period_ms and terms.passed or 0
  if tokens < terms.warning or (tokens > terms.warning and passed_before < terms.refill_below) then
    tokens = math.min(terms.max_tokens, tokens + (period - filled) * ring.limit)
  end
  return math.max(0, tokens - passed_before * terms.interval_ms), period, 0
end

-- Read the state of a ring at `now`, with the tokens refilled; writes nothing.
local function read_shaping(ring, now)
  local terms = ring.shaping
  local values = redis.call('HMGET', terms.key, 'decided', 'moment', 'tokens', 'terms')
  local decided = values[1] and values[1] - 0
  terms.is_dropped = decided and decided - now > ring.bucket_ms * ring.span
  if decided and not terms.is_dropped then
    terms.stored_words = values[4]
    if values[2] then
      local us, rest, parts = string.match(values[2], '^(%d+) (%d+) (%d+)$')
      us, rest = us - 0, rest - 0
      if parts - ring.limit ~= 0 then us, rest = us + (rest > 0 and 1 or 0), 0 end
      terms.moment, terms.rest = us, rest
    end
    if values[3] then
      local tokens, filled, passed = string.match(values[3], '^(%d+) (%d+) (%d+)$')
      terms.tokens, terms.filled, terms.passed = tokens - 0, filled - 0, passed - 0
    end
  end
  if terms.warmup_ms then
    local filled = terms.filled
    terms.tokens, terms.filled, terms.passed = refilled(ring, now)
    terms.is_refilled = terms.filled ~= filled
  end
end

-- How many permits an interval admits with so many tokens.
local function rate_at(ring, tokens)
  local terms, limit = ring.shaping, ring.limit
  if not terms.warmup_ms or tokens < terms.warning then return limit end
  local above = (tokens - terms.warning) / terms.interval_ms
  return math.max(terms.cold_rate, next_up(1 / (above * terms.slope + 1 / limit)))
end

-- When a call may proceed after those before it, at this rate: us, and parts of one us. nil: at once.
local function next_moment(ring, rate)
  local terms, limit, cost = ring.shaping, ring.limit, ring.cost
  local us, rest, interval_us = terms.moment, terms.rest, terms.interval_ms * 1000
  if not us then return nil end
  if rate >= limit then
    rest = rest + cost * (interval_us % limit)
    us = us + cost * math.floor(interval_us / limit)
  else
    local step = cost / rate * interval_us
    us, rest = us + math.floor(step), rest + math.ceil((step - math.floor(step)) * limit)
  end
  return us + math.floor(rest / limit), rest % limit
end

-- The same, rounded up to one us.
local function next_moment_us(ring, rate)
  local us, rest = next_moment(ring, rate)
  return us and us + (rest > 0 and 1 or 0)
end

-- Decide one call on a ring: is it admitted, and the us for which it waits.
local function decide(ring, now)
  local terms = ring.shaping
  if not terms then return ring.used + ring.peak_excess + ring.cost <= ring.limit, 0 end
  ring.rate = rate_at(ring, terms.tokens)
  if not terms.max_wait_us then return ring.used + ring.peak_excess + ring.cost <= ring.rate, 0 end
  local wait_us = math.max(0, (next_moment_us(ring, ring.rate) or 0) - now * 1000)
  return wait_us <= terms.max_wait_us, wait_us
end

-- How many calls of cost 1 a ring would admit now.
local function left_in(ring, now)
  local terms = ring.shaping
  if not terms then return ring.limit - ring.used - ring.peak_excess end
  if not terms.max_wait_us then return math.floor(ring.rate) - ring.used - ring.peak_excess end
  local step, now_us = terms.interval_ms * 1000 / ring.rate, now * 1000
  if not terms.moment or now_us - terms.moment >= step then
    return 1 + math.floor(terms.max_wait_us / step)
  end
  return math.max(0, math.floor(
    (terms.max_wait_us + (now_us - terms.moment) - terms.rest / ring.limit) / step))
end

-- Note that a call was admitted that proceeds after `waits_us`.
local function promise(ring, now, waits_us)
  local terms = ring.shaping
  if terms.max_wait_us then
    local us, rest = now * 1000 + waits_us, 0
    if waits_us > 0 and next_moment_us(ring, ring.rate) == us then
      us, rest = next_moment(ring, ring.rate)
    end
    terms.moment, terms.rest = us, rest
  end
  if terms.warmup_ms then terms.passed = terms.passed + ring.cost end
end

-- Write the state of a ring.
local function write_shaping(ring, now)
  local terms, call, format, lives_ms = ring.shaping, redis.call, string.format, 0
  if terms.is_dropped then call('HDEL', terms.key, 'moment', 'tokens') end
  call('HSET', terms.key, 'decided', format('%.0f', now))
  if terms.stored_words ~= terms.words then
    call('HSET', terms.key, 'terms', terms.words)
  end
  if terms.moment then
    call('HSET', terms.key, 'moment', format('%.0f %.0f %.0f', terms.moment, terms.rest, ring.limit))
    lives_ms = math.max(0, math.ceil(terms.moment / 1000) - now) + terms.longest_step_ms + 1
  end
  if terms.warmup_ms then
    call('HSET', terms.key, 'tokens',
      format('%.0f %.0f %.0f', terms.tokens, terms.filled, terms.passed))
    lives_ms = math.max(lives_ms, terms.forget_ms + 2 * terms.period_ms)
  end
  call('PEXPIRE', terms.key, format('%.0f', lives_ms))
end

-- The moment to look at after `at`, where a call would be admitted at `after` if the tokens did not
-- change before. The rate may rise once, when the period of `now` ends; later it only falls.
local function next_look(terms, at, after, now)
  local period_ms = terms.period_ms
  if math.floor(at / period_ms) == math.floor(now / period_ms) then
    return at - at % period_ms + period_ms
  end
  return after
end

-- From when on the call is admitted by a ring at this rate, not before `at`.
local function admitted_from(ring, rate, at)
  local terms = ring.shaping
  if terms.max_wait_us then
    local us = next_moment_us(ring, rate)
    return us and math.max(at, math.ceil((us - terms.max_wait_us) / 1000)) or at
  end
  local most = math.floor(rate) - ring.cost
  return ring.used + ring.peak_excess > most and math.max(at, (room_at(ring, most))) or at
end

-- When a ring that refuses the call will admit it if no others come, ms.
local function retry_at(ring, now)
  local terms, at = ring.shaping, now
  if not terms then return (room_at(ring, ring.limit - ring.cost)) end
  if not terms.warmup_ms then return admitted_from(ring, ring.rate, now) end
  for _ = 1, MAX_RETRY_ROUNDS do
    local after = admitted_from(ring, rate_at(ring, (refilled(ring, at))), at)
    if math.floor(after / terms.period_ms) == math.floor(at / terms.period_ms) then return after end
    at = next_look(terms, at, after, now)
  end
  return admitted_from(ring, rate_at(ring, terms.max_tokens), at)
end

-- The rings of this call with their shaping, read at `now`. Each ring has three arguments from
-- ARGV[first] on, and its second key holds its state. The caller can wait for at most `cap_ms`. nil if
-- the arguments are malformed.
local function parse_shaped_rings(now, first, cap_ms)
  local ring_count = #KEYS / 2
  if ring_count % 1 ~= 0 then return nil end
  local others = first - 4 * ring_count - 2
  local rings = cap_ms and parse_call(now, others + 3 * ring_count, ring_count)
  for i = 1, rings and ring_count or 0 do
    local ring = rings[i]
    ring.shaping = parse_terms(ring, first + 3 * (i - 1), cap_ms)
    if ring.shaping == nil or KEYS[ring_count + i] ~= ring.key .. ':shaping' then
      return nil
    end
    if ring.shaping then
      ring.shaping.key = KEYS[ring_count + i]
      read_shaping(ring, now)
    end
  end
  return rings
end

-- Decide one call on all rings: is it admitted, for how many us it waits, and the reply but for the
-- stamp: of an admitted call index, left, reset_ms; of a refused one also retry_ms. Nothing is
-- written; `left` of an admitted call is what is left before it.
local function decide_all(rings, now)
  local admitted, waits_us, index = true, 0, nil
  local latest
  for i = 1, #rings do
    local fits, wait_us = decide(rings[i], now)
    if not fits then
      admitted = false
      local at = retry_at(rings[i], now)
      if not latest or at > latest then index, latest = i, at end
    elseif admitted and wait_us > waits_us then
      index, waits_us = i, wait_us
    end
  end
  return admitted, waits_us, index, latest
end

-- index, left, reset_ms of the binding ring: the one that a call waits for, `index`, or without one
-- the ring with the fewest permits left.
local function binding_shaped(rings, now, index)
  local fewest
  if index then
    fewest = left_in(rings[index], now)
  else
    for i = 1, #rings do
      local left = left_in(rings[i], now)
      if not fewest or left < fewest then index, fewest = i, left end
    end
  end
  return index, fewest, reset_ms_of(rings[index], now)
end
