--- lease: charge `permits` for a call, and up to `extra` more to spend until the bucket ends.
--- KEYS   ring...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] now_ms extra prefetch
--- RETURN stamp left now_ms index reset_ms extra ends_in_ms   admitted, with `extra` more
--- RETURN stamp left now_ms index reset_ms extra ends_in_ms bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN stamp -1 now_ms index left reset_ms retry_ms 0     refused
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- At most half of what the call leaves is added, so that other processes find permits too. With
--- `prefetch` 1 no caller waits yet, and a refusal counts no block. Where the newest bucket of one of
--- several rings begins after now_ms (the clock was set back), nothing is added to the call.
-- The positions of the arguments that follow those of the rings.
local NOW, EXTRA, PREFETCH = #KEYS * 4 + 3, #KEYS * 4 + 4, #KEYS * 4 + 5
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua

local rings, prefetch = parse_call(now, 4), ARGV[PREFETCH]
local max_extra = whole(ARGV[EXTRA], 0, MAX_TOTAL)
if not max_extra or (prefetch ~= '0' and prefetch ~= '1') then rings = nil end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local left = left_after(rings)
local extra = math.max(0, math.min(max_extra, math.floor(left / 2)))
if rings[2] and any_ahead(rings, now) then extra = 0 end
local ends_in_ms
for i = 1, #rings do
  local ring = rings[i]
  rotate(ring)
  if left >= 0 then
    add_used(ring, ring.cost + extra)
  elseif prefetch == '0' then
    redis.call('HINCRBY', ring.key, 'block', ring.cost)
  end
  ends_in_ms = math.min(ends_in_ms or MAX_TOTAL, ring.start + ring.bucket_ms - now)
end
if left >= 0 then
  local index, left_now, reset_ms = binding_ring(rings, now)
  return append_bucket_starts({stamp, left_now, now, index, reset_ms, extra, ends_in_ms}, rings, now)
end
local index, left_now, reset_ms, retry_ms = refusal(rings, now)
return {stamp, -1, now, index, left_now, reset_ms, retry_ms, 0}
