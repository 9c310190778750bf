-- The slots of a resource: a sorted set of holders, scored by the deadline of each, ms. A holder whose
-- deadline has come has no slot any more, whether or not its member has been removed yet. Members with
-- scores below 0 wait for a slot (shared/slot_line.lua).
--
-- A holder is named 'limit:ttl_ms:id:owner': the limit and the time to live that its process uses, an id
-- that no other holder has, and the process.
local MAX_TOTAL, MAX_HOLDERS, PLACE_MS = 1e13, 1000, 1000

-- `word` as a whole number of at most MAX_TOTAL in plain digits; nil for anything else.
local function whole(word)
  if not word or word == '' or string.find(word, '%D') then return nil end
  local number = tonumber(word)
  return number <= MAX_TOTAL and number or nil
end

-- True if `word` is the name of a holder.
local function is_holder(word)
  return word and #word <= 128 and string.find(word, '^%d+:%d+:[%w.]+:[!-~]+$') ~= nil
end

-- True if `holder` has a slot at `now`.
local function has_slot(holder)
  local deadline = redis.call('ZSCORE', KEYS[1], holder)
  return deadline and deadline - now > 0
end

-- How many holders have a slot at `now`.
local function held()
  return redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf')
end

-- Have the key expire with the last deadline in it, and not before the places in the line.
local function renew_expiry()
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
  redis.call('PEXPIRE', KEYS[1], math.max(PLACE_MS, last[2] - now))
end

-- The time of the call as an argument is a whole number; so are those that `TIME` gives.
local is_malformed = not (now >= 0 and now <= MAX_TOTAL)
  or client_now and string.find(client_now, '%D')
