--- breaker_adaptive: add calls that ended in a process to an adaptive breaker; return the fleet's counts.
--- KEYS   breaker senders
--- ARGV   stamp bucket_ms buckets now_ms passed_ms force_ms sender seq counts
--- RETURN stamp forced now_ms passed_ms (number success failure drop)...
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `counts`: 'start success failure drop;' for each bucket; those that have expired are dropped. A
--- breaker takes each `seq` of a `sender` once; with an empty sender it takes every flush. `passed_ms`:
--- when a call last passed although some are dropped; 0 for never. With force_ms above 0 a pass is
--- claimed: `forced` is 1 if there was one, and the last is longer than that ago; it is then the last one.
local stamp, client_now = ARGV[1], ARGV[4]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/numbers.lua
--@include shared/senders.lua

local bucket_ms, span = whole(ARGV[2], 1), whole(ARGV[3], 1)
local passed_ms, force_ms = whole(ARGV[5], 0), whole(ARGV[6], 0)
local sender, seq, buckets = ARGV[7] or '-', ARGV[8], parse_counts(ARGV[9], 4)
if #KEYS ~= 2 or KEYS[2] ~= KEYS[1] .. ':senders' or #ARGV ~= 9 or not bucket_ms or not span or span > 60
  or not passed_ms or not force_ms or not buckets or not string.find(sender, '^%x*$') or not whole(seq, 0)
  or not (now >= 0 and now <= MAX_TOTAL) or client_now and string.find(client_now, '%D') then
  return redis.error_reply(MALFORMED)
end
local breaker = {key = KEYS[1], senders = KEYS[2], bucket_ms = bucket_ms, span = span,
  start = now - now % bucket_ms}
local newest, call = breaker.start / bucket_ms, redis.call

local slots, last_pass_ms = {}, 0
local all = call('HGETALL', breaker.key)
for i = 1, #all, 2 do
  if all[i] == 'passed' then
    -- A time ahead of now is from before the clock was set back.
    last_pass_ms = math.min(tonumber(all[i + 1]) or 0, now)
  else
    local number, success, failure, drop = string.match(all[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
    if not number or not string.find(all[i], '^%d+$') then return redis.error_reply(MALFORMED) end
    number = tonumber(number)
    if number > newest - span and number <= newest then
      slots[tonumber(all[i])] = {number, tonumber(success), tonumber(failure), tonumber(drop)}
    end
  end
end

-- Decide, before anything is written.
local live = {}
for _, bucket in ipairs(buckets) do
  local number = math.min(newest, math.floor(bucket[1] / bucket_ms))
  if number > newest - span then live[#live + 1] = {number, bucket[2], bucket[3], bucket[4]} end
end
local known_number
if live[1] and sender ~= '' then
  local taken
  taken, known_number = is_taken(breaker, sender, seq)
  if taken then live = {} end
end
local pass_ms = math.max(last_pass_ms, math.min(passed_ms, now))
local forced = force_ms > 0 and pass_ms > 0 and now - pass_ms > force_ms
if forced then pass_ms = now end

for _, counted in ipairs(live) do
  local slot = counted[1] % span
  local known = slots[slot]
  if known and known[1] == counted[1] then
    for i = 2, 4 do counted[i] = math.min(known[i] + counted[i], MAX_TOTAL) end
  end
  slots[slot] = counted
  call('HSET', breaker.key, digits(slot), digits(counted[1]) .. ' ' .. digits(counted[2]) .. ' '
    .. digits(counted[3]) .. ' ' .. digits(counted[4]))
end
if live[1] and sender ~= '' then remember_flush(breaker, sender, seq, known_number) end
if pass_ms > last_pass_ms then call('HSET', breaker.key, 'passed', digits(pass_ms)) end
if live[1] or pass_ms > last_pass_ms then
  call('PEXPIRE', breaker.key, digits((span + 1) * bucket_ms))
end

local reply, numbers = {stamp, forced and 1 or 0, now, pass_ms}, {}
for _, bucket in pairs(slots) do numbers[#numbers + 1] = bucket end
table.sort(numbers, function(a, b) return a[1] < b[1] end)
for _, bucket in ipairs(numbers) do
  for i = 1, 4 do reply[#reply + 1] = bucket[i] end
end
return reply
