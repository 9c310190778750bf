--- hold: give a holder a slot, unless as many as `limit` are held or those before it in the line can use the rest; extend the one it has.
--- KEYS   slots line
--- ARGV   stamp limit ttl_ms holder [now_ms [asks waited_ms...]]   asks: new or head; how long each has waited, the first first
--- RETURN stamp held now_ms 1 ttl_ms                         it has a slot, for ttl_ms
--- RETURN stamp held now_ms 0 first_ends_ms ahead age_ms     it has none; time until the first deadline, places before it, time since a slot was granted
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
local stamp, client_now = ARGV[1], ARGV[5]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua
--@include shared/slot_line.lua

local key, call = KEYS[1], redis.call
local limit, ttl_ms, holder, asks = whole(ARGV[2]), whole(ARGV[3]), ARGV[4], ARGV[6]
local waited, is_head = {}, asks == 'head'
for i = 7, math.min(#ARGV, 7 + MAX_PLACES) do
  waited[i - 6] = whole(ARGV[i])
  if not waited[i - 6] then is_malformed = true break end
  -- Who stands behind another of its process has not waited for longer.
  if i > 7 then waited[i - 6] = math.min(waited[i - 6], waited[i - 7]) end
end
if asks and not (is_head and #waited <= MAX_PLACES or asks == 'new' and #waited == 1) then
  is_malformed = true
end
if is_malformed or #KEYS ~= 2 or not limit or not ttl_ms or ttl_ms < 1 or not is_holder(holder) then
  return redis.error_reply('ERR distwindow: malformed arguments')
end

local count, extends = held(), has_slot(holder)
local line, process = KEYS[2], string.match(holder, '^%d+:%d+:(%w*)')
local ahead = 0
if call('ZCOUNT', line, '-inf', '+inf') > 0 then
  drop_silent(line, now)
  -- A head takes the places of its process anew, and passes it by.
  if is_head then leave(line, process) end
  ahead = call('ZCOUNT', line, 0, is_head and waited[1] and '(' .. arrival(waited[1], now) or '+inf')
end

if extends or ahead < limit - count then
  if is_head then take_places(line, process, waited, 2, now) end
  call('ZADD', key, now + ttl_ms, holder)
  call('ZREMRANGEBYSCORE', key, '-inf', now)
  renew_expiry()
  return {stamp, extends and count or count + 1, now, 1, ttl_ms}
end
if is_head or asks and not call('ZSCORE', line, process) then
  take_places(line, process, waited, 1, now)
end

-- A deadline that is further away than its holder's own time to live was written before the clock was
-- set back. It is moved to that distance, so that a dead holder keeps its slot no longer than usual.
local far = call('ZRANGEBYSCORE', key, '(' .. now + ttl_ms, '+inf', 'WITHSCORES')
for i = 1, #far, 2 do
  local own_ttl_ms = whole(string.match(far[i], '^%d+:(%d+):')) or 0
  if far[i + 1] - now > own_ttl_ms then call('ZADD', key, now + own_ttl_ms, far[i]) end
end
local first = call('ZRANGEBYSCORE', key, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
-- A holder with this time to live had its slot granted or renewed so long ago.
local from_end = -1 - call('ZCOUNT', key, '(' .. now + ttl_ms, '+inf')
local last = call('ZRANGE', key, from_end, from_end, 'WITHSCORES')[2]
local age_ms = last and last - now > 0 and now + ttl_ms - last or 0
return {stamp, count, now, 0, first and first - now or 0, ahead, age_ms}
