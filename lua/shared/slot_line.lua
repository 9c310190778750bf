-- The line of a resource: who waits for a slot. A sorted set with
--   process.1, process.2, ...  a place of the process each: the time at which its waiter began to wait
--   process                    until when these are its places, ms, negative: so it is before all places
-- A process tells its first MAX_PLACES waiters whenever the first of them asks, and its places are
-- those that it has told last. PLACE_MS after that they are dropped: the process may be dead.
local MAX_PLACES, PLACE_MS = 8, 1000

-- When somebody began to wait who has waited for `waited_ms`.
local function arrival(waited_ms, now)
  return math.max(0, now - waited_ms)
end

-- Take the places of `process` from it.
local function leave(line, process)
  local members = {process}
  for i = 1, MAX_PLACES do members[i + 1] = process .. '.' .. i end
  redis.call('ZREM', line, unpack(members))
end

-- Drop the places of processes that have told nothing for PLACE_MS. Where the clock was set back, these
-- are also those whose time is further away than that.
local function drop_silent(line, now)
  for _, process in ipairs(redis.call('ZRANGEBYSCORE', line, -now, '(0')) do leave(line, process) end
  local far = redis.call('ZRANGEBYSCORE', line, '-inf', '(' .. -(now + PLACE_MS))
  for _, process in ipairs(far) do leave(line, process) end
end

-- Give `process`, which has no places, those of its waiters from number `first` on.
local function take_places(line, process, waited, first, now)
  if not waited[first] then return end
  local members = {-(now + PLACE_MS), process}
  for i = first, #waited do
    members[#members + 1] = arrival(waited[i], now)
    members[#members + 1] = process .. '.' .. i - first + 1
  end
  redis.call('ZADD', line, unpack(members))
  redis.call('PEXPIRE', line, PLACE_MS)
end
