-- A circuit breaker, in one hash (its fields: lua/README.md). In a script it is a table:
--   key senders                         its hash, and the hash of its sender records
--   measure threshold min_calls         the rule (parse_breaker)
--   open_ms probe_ms probes bucket_ms span
--   state epoch retry_ms in_a_row       as the hash has them; closed with epoch 0 where there is none
--   expires_ms                          from then on it is as if it had never been
--   deadlines                           of the probes that are under way, by their ids
--   buckets                             by slot: {number, total, bad}
--   expired                             names of the fields that an expired breaker has left, but for `state`
--   start                               of the bucket of now, ms
local CLOSED, OPEN, HALF_OPEN = 0, 1, 2
-- A breaker that is not closed, and that nobody calls, is kept for this long beyond its times.
local KEPT_MS = 3600000
local MAX_BUCKETS = 60
-- The largest threshold of each measure.
local MOST = {ratio = 1, count = MAX_TOTAL, in_a_row = MAX_TOTAL}

-- In how many ms `time` comes; 0 if it has come. A time that is further ahead than was ever set is from
-- before the clock was set back, and has come.
local function wait_ms(time, longest)
  local wait = time - now
  return wait > 0 and wait <= longest and wait or 0
end

-- Complete `breaker` with what its hash holds.
local function read_breaker(breaker)
  breaker.state, breaker.epoch, breaker.retry_ms, breaker.in_a_row = CLOSED, 0, 0, 0
  breaker.deadlines, breaker.buckets, breaker.expired = {}, {}, {}
  local all = redis.call('HGETALL', breaker.key)
  local fields = {}
  for i = 1, #all, 2 do fields[all[i]] = all[i + 1] end
  if not fields.state then
    -- A hash without a state is not a breaker: nothing is written into it.
    return all[1] == nil
  end
  local state, epoch, retry_ms, in_a_row, expires_ms =
    string.match(fields.state, '^([012]) (%d+) (%d+) (%d+) (%d+)$')
  if not state then return false end
  if now - expires_ms >= 0 then
    for i = 1, #all, 2 do
      if all[i] ~= 'state' then breaker.expired[#breaker.expired + 1] = all[i] end
    end
    return true
  end
  breaker.state, breaker.epoch, breaker.retry_ms, breaker.in_a_row =
    tonumber(state), tonumber(epoch), tonumber(retry_ms), tonumber(in_a_row)
  breaker.expires_ms = tonumber(expires_ms)
  for name, value in pairs(fields) do
    local probe_id = string.match(name, '^p:(.*)$')
    if probe_id then
      breaker.deadlines[probe_id] = tonumber(value)
    elseif string.find(name, '^%d+$') then
      local number, total, bad = string.match(value, '^(%d+) (%d+) (%d+)$')
      breaker.buckets[tonumber(name)] = {tonumber(number), tonumber(total), tonumber(bad)}
    end
  end
  return true
end

-- The breaker of this call, read at `now`; nil if the arguments are malformed.
local function parse_breaker()
  local measure, threshold = ARGV[2], ARGV[3] or ''
  local breaker = {key = KEYS[1], senders = KEYS[2], measure = measure,
    min_calls = whole(ARGV[4], 1), open_ms = whole(ARGV[5], 1), probe_ms = whole(ARGV[6], 1),
    probes = whole(ARGV[7], 1), bucket_ms = whole(ARGV[8], 1), span = whole(ARGV[9], 1)}
  if #KEYS ~= 2 or KEYS[2] ~= KEYS[1] .. ':senders' or not MOST[measure]
    or #threshold > 400 or not string.find(threshold, '^%d+%.?%d*$')
    or not (now >= 0 and now <= MAX_TOTAL) or client_now and string.find(client_now, '%D')
    or not (breaker.min_calls and breaker.open_ms and breaker.probe_ms and breaker.probes
      and breaker.bucket_ms and breaker.span)
    or breaker.span > MAX_BUCKETS then
    return nil
  end
  breaker.threshold = tonumber(threshold)
  if breaker.threshold <= 0 or breaker.threshold > MOST[measure] then
    return nil
  end
  breaker.start = now - now % breaker.bucket_ms
  return read_breaker(breaker) and breaker or nil
end

-- The calls in the window, and the bad ones among them; or twice the failures in a row.
local function totals(breaker)
  if breaker.measure == 'in_a_row' then
    local failures = breaker.state == CLOSED and breaker.in_a_row or 0
    return failures, failures
  end
  local newest, total, bad = breaker.start / breaker.bucket_ms, 0, 0
  for _, bucket in pairs(breaker.buckets) do
    if bucket[1] > newest - breaker.span and bucket[1] <= newest then
      total, bad = total + bucket[2], bad + bucket[3]
    end
  end
  return total, bad
end

-- True if the calls in the window open a closed breaker.
local function is_reached(breaker)
  local total, bad = totals(breaker)
  local reached = breaker.measure == 'ratio' and bad / total or bad
  return total >= breaker.min_calls and reached >= breaker.threshold
end

-- Delete what an expired breaker has left. The state is set by `keep`, and so the hash is never empty in
-- between (lua/README.md, "Migrating slots").
local function delete_expired(breaker)
  if breaker.expired[1] then redis.call('HDEL', breaker.key, unpack(breaker.expired)) end
end

-- Write the state, and let the hash expire when the breaker does.
local function keep(breaker)
  local expires_ms
  if breaker.state == CLOSED then
    expires_ms = breaker.start + (breaker.span + 1) * breaker.bucket_ms
    if breaker.in_a_row > 0 then expires_ms = expires_ms + breaker.open_ms end
  else
    local last = breaker.state == OPEN and breaker.retry_ms or now + breaker.probe_ms
    expires_ms = math.max(last, now) + breaker.span * breaker.bucket_ms + KEPT_MS
  end
  redis.call('HSET', breaker.key, 'state', string.format('%d %.0f %.0f %.0f %.0f', breaker.state,
    breaker.epoch, breaker.retry_ms, breaker.in_a_row, expires_ms))
  redis.call('PEXPIRE', breaker.key, digits(expires_ms - now))
end

-- Begin the epoch of another state, without probes. The caller writes the state by `keep`.
local function change(breaker, state)
  for probe_id in pairs(breaker.deadlines) do redis.call('HDEL', breaker.key, 'p:' .. probe_id) end
  breaker.deadlines, breaker.in_a_row, breaker.state = {}, 0, state
  breaker.epoch = math.max(breaker.epoch + 1, now)
end

-- Open it: from `retry_ms` on a probe may go.
local function open(breaker)
  breaker.retry_ms = now + breaker.open_ms
  change(breaker, OPEN)
  keep(breaker)
end

-- Close it, and count afresh.
local function close(breaker)
  for slot in pairs(breaker.buckets) do redis.call('HDEL', breaker.key, digits(slot)) end
  breaker.buckets = {}
  change(breaker, CLOSED)
  keep(breaker)
end

-- The ids of the probes that have time left, and how many they are.
local function alive_probes(breaker)
  local alive, count = {}, 0
  for probe_id, deadline in pairs(breaker.deadlines) do
    if wait_ms(deadline, breaker.probe_ms) > 0 then alive[probe_id], count = deadline, count + 1 end
  end
  return alive, count
end

-- In how many ms a call may be let through; 0 for now.
local function retry_in_ms(breaker)
  if breaker.state == OPEN then return wait_ms(breaker.retry_ms, breaker.open_ms) end
  if breaker.state == CLOSED then return 0 end
  local alive, count = alive_probes(breaker)
  if count + breaker.in_a_row < breaker.probes then return 0 end
  local first
  for _, deadline in pairs(alive) do first = math.min(first or deadline, deadline) end
  return first - now
end

-- The reply; `done` is 1 if something was counted, handed out or ended.
local function breaker_reply(stamp, breaker, done)
  local total, bad = totals(breaker)
  return {stamp, done, now, breaker.state, breaker.epoch, retry_in_ms(breaker), total, bad}
end
