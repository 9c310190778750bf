--- holders: who has a slot, and for how long; writes nothing.
--- KEYS   slots
--- ARGV   stamp [now_ms]
--- RETURN stamp held now_ms (holder ends_ms ...)             the first deadline first
--- RETURN stamp -2 now_ms                                    past its deadline
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua

if is_malformed or #KEYS ~= 1 or #ARGV > 2 then return redis.error_reply('ERR distwindow: malformed arguments') end
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES')
for i = 2, #found, 2 do found[i] = found[i] - now end
return {stamp, #found / 2, now, found}
