-- The line of a resource: who waits for a slot. Members of the set of its slots, all scored below 0:
--   process                    until when the places below are its own, ms, negative, less LINE
--   process.1, process.2, ...  a place of the process each: when its waiter began to wait, less LINE
-- So processes are before places, and places before holders. A process tells its first MAX_PLACES waiters
-- whenever the first of them asks, and its places are those that it has told last. PLACE_MS after that
-- they do not count: the process may be dead.
local MAX_PLACES, LINE = 8, 2e13

-- The score of a process with places until `until_ms`.
local function process_score(until_ms)
  return -until_ms - LINE
end

-- The score of the place of somebody who has waited for `waited_ms`.
local function place_score(waited_ms, now)
  return math.max(0, now - waited_ms) - LINE
end

-- The scores of the places that `process` has told.
local function places_of(process)
  local scores = {}
  for i = 1, MAX_PLACES do
    local score = redis.call('ZSCORE', KEYS[1], process .. '.' .. i)
    if not score then break end
    scores[i] = score - 0
  end
  return scores
end

-- The places of processes that have told nothing for PLACE_MS, by process. Where the clock was set back,
-- these are also those whose time is further away than that.
local function silent_places(now)
  local key, silent = KEYS[1], {}
  for _, process in ipairs(redis.call('ZRANGEBYSCORE', key, process_score(now), '(' .. -LINE)) do
    silent[process] = places_of(process)
  end
  local far = redis.call('ZRANGEBYSCORE', key, '-inf', '(' .. process_score(now + PLACE_MS))
  for _, process in ipairs(far) do silent[process] = places_of(process) end
  return silent
end

-- Remove the places that `silent_places` has found, and of those of `process` the ones after its first `kept`.
local function drop_places(dropped, process, kept)
  for each, places in pairs(dropped) do
    local first, members = each == process and kept or 0, {}
    if first == 0 then members[1] = each end
    for i = first + 1, #places do members[#members + 1] = each .. '.' .. i end
    if members[1] then redis.call('ZREM', KEYS[1], unpack(members)) end
  end
end
