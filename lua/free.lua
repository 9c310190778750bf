--- free: take the slots of these holders from them. To free a slot again changes nothing.
--- KEYS   slots
--- ARGV   stamp now_ms holder...
--- RETURN stamp freed now_ms                                 how many of them had a slot
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua

local count = #ARGV - 2
if #KEYS ~= 1 or count < 1 or count > MAX_HOLDERS then is_malformed = true end
for i = 1, is_malformed and 0 or count do
  if not is_holder(ARGV[2 + i]) then is_malformed = true break end
end
if is_malformed then return redis.error_reply('ERR distwindow: malformed arguments') end

-- All at once: the set may be empty and gone then. A holder that is named twice is freed once.
local freed = {}
for i = 3, #ARGV do
  if has_slot(ARGV[i]) then freed[#freed + 1] = ARGV[i] end
end
return {stamp, freed[1] and redis.call('ZREM', KEYS[1], unpack(freed)) or 0, now}
