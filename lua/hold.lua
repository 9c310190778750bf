--- hold: give a holder a slot, unless as many as `limit` are held; extend the one that it has already.
--- KEYS   slots
--- ARGV   guard limit ttl_ms holder [now_ms]
--- RETURN guard held now_ms 1 ttl_ms                         it has a slot, for ttl_ms
--- RETURN guard held now_ms 0 first_ends_ms                  all are held; time until the first deadline
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
local guard, client_now = ARGV[1], ARGV[5]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua

local key, call = KEYS[1], redis.call
local limit, ttl_ms, holder = whole(ARGV[2]), whole(ARGV[3]), ARGV[4]
if is_malformed or #ARGV > 5 or not limit or not ttl_ms or ttl_ms < 1 or not is_holder(holder) then
  return redis.error_reply('ERR distwindow: malformed arguments')
end

local count, extends = held(), has_slot(holder)
if extends or count < limit then
  call('ZREMRANGEBYSCORE', key, '-inf', now)
  call('ZADD', key, now + ttl_ms, holder)
  renew_expiry()
  return {guard, extends and count or count + 1, now, 1, ttl_ms}
end

-- A deadline that is further away than its holder's own time to live was written before the clock was
-- set back. It is moved to that distance, so that a dead holder keeps its slot no longer than usual.
local ahead = call('ZRANGEBYSCORE', key, '(' .. now + ttl_ms, '+inf', 'WITHSCORES')
for i = 1, #ahead, 2 do
  local own_ttl_ms = whole(string.match(ahead[i], '^%d+:(%d+):')) or 0
  if ahead[i + 1] - now > own_ttl_ms then call('ZADD', key, now + own_ttl_ms, ahead[i]) end
end
local first = call('ZRANGEBYSCORE', key, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
return {guard, count, now, 0, first and first - now or 0}
