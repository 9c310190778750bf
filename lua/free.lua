--- free: take the slots of these holders from them. To free a slot again changes nothing.
--- KEYS   slots
--- ARGV   stamp now_ms holder...
--- RETURN stamp freed now_ms                                 how many of them had a slot
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/slots.lua

local count, freed = #ARGV - 2, 0
if #KEYS ~= 1 or count < 1 or count > MAX_HOLDERS then is_malformed = true end
for i = 1, is_malformed and 0 or count do
  if not is_holder(ARGV[2 + i]) then is_malformed = true break end
end
if is_malformed then return redis.error_reply('ERR distwindow: malformed arguments') end

-- A holder that is named twice has been freed when its second name is met.
for i = 3, #ARGV do
  if has_slot(ARGV[i]) then
    redis.call('ZREM', KEYS[1], ARGV[i])
    freed = freed + 1
  end
end
return {stamp, freed, now}
