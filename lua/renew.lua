--- renew: extend the slots of these holders; one that has no slot any more does not get another.
--- KEYS   slots
--- ARGV   stamp ttl_ms now_ms holder...
--- RETURN stamp renewed now_ms place...                      the places in ARGV, from 1, of those without a slot
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
local stamp, client_now = ARGV[1], ARGV[3]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua

local ttl_ms = whole(ARGV[2])
local count = #ARGV - 3
if #KEYS ~= 1 or count < 1 or count > MAX_HOLDERS or not ttl_ms or ttl_ms < 1 then is_malformed = true end
for i = 1, is_malformed and 0 or count do
  if not is_holder(ARGV[3 + i]) then is_malformed = true break end
end
if is_malformed then return redis.error_reply('ERR distwindow: malformed arguments') end

local reply, members = {stamp, 0, now}, {}
for i = 1, count do
  if has_slot(ARGV[3 + i]) then
    members[#members + 1], members[#members + 2] = now + ttl_ms, ARGV[3 + i]
  else
    reply[#reply + 1] = i
  end
end
reply[2] = #members / 2
if members[1] then
  redis.call('ZADD', KEYS[1], unpack(members))
  renew_expiry()
end
return reply
