--- hold: give a holder a slot, unless as many as `limit` are held or those before it in the line can use the rest; extend the one it has.
--- KEYS   slots
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
if is_malformed or #KEYS ~= 1 or not limit or not ttl_ms or ttl_ms < 1 or not is_holder(holder) then
  return redis.error_reply('ERR distwindow: malformed arguments')
end

-- Who is in the line: those who are silent do not count. A head tells the places of its process anew, and
-- passes those that it had told before.
local count, extends, process = held(), has_slot(holder), string.match(holder, '^%d+:%d+:(%w*)')
local ahead, dropped, told = 0, {}, 0
if call('ZCOUNT', key, '-inf', '(0') > 0 then
  dropped = silent_places(now)
  if is_head then dropped[process] = dropped[process] or places_of(process) end
  local before = is_head and waited[1] and place_score(waited[1], now)
  ahead = call('ZCOUNT', key, -LINE, '(' .. (before or 0))
  for _, places in pairs(dropped) do
    for i = 1, #places do
      if not before or places[i] < before then ahead = ahead - 1 end
    end
  end
end

local granted, members = extends or ahead < limit - count, {}
local skipped = granted and 1 or 0
if #waited > skipped
  and (is_head or not granted and (dropped[process] or not call('ZSCORE', key, process))) then
  told = #waited - skipped
  members = {process_score(now + PLACE_MS), process}
  for i = 1, told do
    members[2 * i + 1], members[2 * i + 2] = place_score(waited[skipped + i], now), process .. '.' .. i
  end
end

-- What is added is added first, and at once, so that the set is never empty in between.
if granted then
  call('ZADD', key, now + ttl_ms, holder, unpack(members))
  renew_expiry()
  drop_places(dropped, process, told)
  call('ZREMRANGEBYSCORE', key, 0, now)
  return {stamp, extends and count or count + 1, now, 1, ttl_ms}
end

if told > 0 then
  call('ZADD', key, unpack(members))
  renew_expiry()
end
-- A deadline that is further away than its holder's own time to live was written before the clock was
-- set back. It is moved to that distance, so that a dead holder keeps its slot no longer than usual.
local far, later = call('ZRANGEBYSCORE', key, '(' .. now + ttl_ms, '+inf', 'WITHSCORES'), 0
for i = 1, #far, 2 do
  local own_ttl_ms = whole(string.match(far[i], '^%d+:(%d+):')) or 0
  if far[i + 1] - now > own_ttl_ms then call('ZADD', key, now + own_ttl_ms, far[i]) end
  if own_ttl_ms > ttl_ms then later = later + 1 end
end
local first = call('ZRANGEBYSCORE', key, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
-- A holder with this time to live had its slot granted or renewed so long ago.
local last = call('ZRANGE', key, -1 - later, -1 - later, 'WITHSCORES')[2]
local age_ms = last and last - now > 0 and now + ttl_ms - last or 0
-- Last, as the set may be empty and gone then.
drop_places(dropped, process, told)
return {stamp, count, now, 0, first and first - now or 0, ahead, age_ms}
