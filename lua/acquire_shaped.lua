--- acquire_shaped: count one call where limits are paced or warm up, with the time to wait, or refuse it.
--- KEYS   ring... shaping...
--- ARGV   stamp (permits limit bucket_ms shape)... now_ms write_limit cap_ms (max_wait_ms warmup_ms cold_factor)...
--- RETURN stamp left now_ms index reset_ms wait_us           admitted, to proceed after wait_us
--- RETURN stamp left now_ms index reset_ms wait_us bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN stamp -1 now_ms index left reset_ms retry_ms       refused
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `shaping` of a ring: the hash `<ring>:shaping` with the promised moment and the tokens. Of a limit
--- that is not paced max_wait_ms is empty, and of one that does not warm up the other two are. The
--- caller waits for at most cap_ms, or if that is empty for as long as the limits have it wait. The
--- binding ring of an admitted call is the one that it waits for, or has the fewest permits left.
-- The positions of the arguments that follow those of the rings.
local NOW, WRITE_LIMIT, CAP = #KEYS * 2 + 2, #KEYS * 2 + 3, #KEYS * 2 + 4
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua
--@include shared/shaping.lua

local cap_ms = ARGV[CAP] == '' and MAX_SHAPED_MS or whole(ARGV[CAP], 0, MAX_SHAPED_MS)
local rings, write_limit = parse_shaped_rings(now, CAP + 1, cap_ms), ARGV[WRITE_LIMIT]
if not rings or (write_limit ~= '0' and write_limit ~= '1') then
  return redis.error_reply('ERR distwindow: malformed arguments')
end
local admitted, waits_us, index, retry_at_ms = decide_all(rings, now)
local left, reset_ms
if not admitted then
  left, reset_ms = left_in(rings[index], now), reset_ms_of(rings[index], now)
end
for i = 1, #rings do
  local ring = rings[i]
  rotate(ring)
  if write_limit == '1' then redis.call('HSET', ring.key, 'limit', ring.limit_field) end
  if admitted then
    add_used(ring, ring.cost)
    if ring.shaping then promise(ring, now, waits_us) end
  else
    redis.call('HINCRBY', ring.key, 'block', ring.cost)
  end
  if ring.shaping and (admitted or ring.shaping.is_refilled) then write_shaping(ring, now) end
end
if not admitted then
  local retry_ms = retry_at_ms - now
  return {stamp, -1, now, index, left, math.max(reset_ms, retry_ms), retry_ms}
end
index, left, reset_ms = binding_shaped(rings, now, index)
return append_bucket_starts({stamp, math.max(0, left), now, index, reset_ms, waits_us}, rings, now)
