--- breaker_flush: add calls that ended in a process to a closed breaker, and open it if its rule says so.
--- KEYS   breaker senders
--- ARGV   stamp measure threshold min_calls open_ms probe_ms probes bucket_ms buckets now_ms sender seq counts
--- RETURN stamp taken now_ms state epoch retry_in_ms total bad
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `counts`: 'epoch start total bad;' for each epoch and bucket in which calls were let through and
--- ended. Those of an earlier epoch, and of buckets that have expired, are dropped. Without counts
--- the state is read. With the measure `in_a_row` the counts are in the order in which the calls ended,
--- `bad` of each are those after its last good call, and `total` and `bad` of the reply are the failures in a row. A
--- breaker takes each `seq` of a `sender` once; with an empty sender it takes every flush. `state`: 0
--- closed, 1 open, 2 half-open.
local stamp, client_now = ARGV[1], ARGV[10]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/numbers.lua
--@include shared/breaker.lua
--@include shared/senders.lua

local sender, seq, buckets = ARGV[11] or '-', ARGV[12], parse_counts(ARGV[13], 4)
local breaker = parse_breaker()
for _, bucket in ipairs(buckets or {}) do
  if bucket[4] > bucket[3] then buckets = nil break end
end
if not breaker or #ARGV ~= 13 or not buckets or not string.find(sender, '^%x*$') or not whole(seq, 0) then
  return redis.error_reply(MALFORMED)
end

-- Decide, before anything is written, which counts are taken: those of this epoch in the window. What
-- ended after now is counted in the newest bucket.
local newest, live = breaker.start / breaker.bucket_ms, {}
for _, bucket in ipairs(breaker.state == CLOSED and buckets or {}) do
  local epoch, start, total, bad = unpack(bucket)
  local number = math.min(newest, math.floor(start / breaker.bucket_ms))
  if epoch >= breaker.epoch and number > newest - breaker.span then
    live[#live + 1] = {number, total, bad}
  end
end
local taken, known_number = live[1] == nil, nil
if live[1] and sender ~= '' then taken, known_number = is_taken(breaker, sender, seq) end
if taken then return breaker_reply(stamp, breaker, 0) end

delete_expired(breaker)
for _, counted in ipairs(live) do
  local number, total, bad = unpack(counted)
  if breaker.measure == 'in_a_row' then
    -- As many as the rule says open it, whatever follows.
    if breaker.in_a_row < breaker.threshold then
      breaker.in_a_row = bad + (bad == total and breaker.in_a_row or 0)
    end
  else
    local slot = number % breaker.span
    local known = breaker.buckets[slot]
    if known and known[1] == number then
      total, bad = math.min(known[2] + total, MAX_TOTAL), math.min(known[3] + bad, MAX_TOTAL)
    end
    breaker.buckets[slot] = {number, total, bad}
    redis.call('HSET', breaker.key, digits(slot),
      digits(number) .. ' ' .. digits(total) .. ' ' .. digits(bad))
  end
end
if sender ~= '' then remember_flush(breaker, sender, seq, known_number) end
if is_reached(breaker) then
  open(breaker)
else
  keep(breaker)
end
return breaker_reply(stamp, breaker, 1)
