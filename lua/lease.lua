--- lease: charge `amount` for a call, and up to `more` permits to spend until the bucket ends.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] now_ms more quiet
--- RETURN guard left now_ms index reset_ms more ends_ms      so many more; ends_ms until they die
--- RETURN guard left now_ms index reset_ms more ends_ms bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN guard -1 now_ms index left reset_ms retry_ms 0     refused
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
--- Never more than half of what is left, so that other processes find something. `quiet` is 1 where
--- nobody has called yet, and no block is to be counted. Where the newest bucket of one of several
--- rings begins after now_ms (the clock was set back), nothing is lent beyond the call itself.
local guard, at = ARGV[1], #KEYS * 4 + 3
local given = ARGV[at]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/verdict.lua

local rings, more, quiet = rings_at(now, 4), ARGV[at + 1] or '', ARGV[at + 2]
if not string.find(more, '^%d+$') or more - 0 > MOST or (quiet ~= '0' and quiet ~= '1') then
  rings = nil
end
local least
for i = 1, rings and #rings or 0 do
  local ring = rings[i]
  ring.cost = ring.amount
  if ring.cost < 1 then rings = nil break end
  least = math.min(least or MOST, ring.limit - ring.used - ring.cost)
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local lent = math.max(0, math.min(more - 0, math.floor(least / 2)))
if rings[2] and is_ahead(rings, now) then lent = 0 end
local ends
for i = 1, #rings do
  local ring = rings[i]
  turn(ring)
  if least >= 0 then
    count(ring, ring.cost + lent)
  elseif quiet == '0' then
    redis.call('HINCRBY', ring.key, 'block', ring.cost)
  end
  ends = math.min(ends or MOST, ring.start + ring.width - now)
end
if least >= 0 then
  local index, left, reset = binding(rings, now)
  return with_starts({guard, left, now, index, reset, lent, ends}, rings, now)
end
local index, left, reset, retry = refusal(rings, now)
return {guard, -1, now, index, left, reset, retry, 0}
