--- acquire_turn: decide one call as `acquire` does; a refused one also takes a place in the virtual line.
--- KEYS   ring... line...
--- ARGV   stamp (permits limit bucket_ms shape)... now_ms held_ms takes_next
--- RETURN stamp left now_ms index reset_ms turn_in_ms queued          admitted
--- RETURN stamp left now_ms index reset_ms turn_in_ms queued bucket_start_ms...   the same, a ring is ahead of now_ms
--- RETURN stamp -1 now_ms index left reset_ms retry_ms turn_in_ms     refused, to ask again in turn_in_ms
--- RETURN stamp -2 now_ms                                             past its deadline, nothing done
--- `line` of a ring: the hash `<ring>:line`. The place is in the line of the ring that has room last.
--- `held_ms` is the turn that the caller has been told before, 0 if none: it keeps its place if it
--- comes before that, or if there is room within a bucket. With `takes_next` 1 an admitted call takes
--- a place for the next waiter of its process: `turn_in_ms` is then the time until that one's turn,
--- and `queued` the permits for which others in the line wait. Without it both are 0.
-- The positions of the arguments that follow those of the rings.
local NOW, HELD, TAKES_NEXT = #KEYS * 2 + 2, #KEYS * 2 + 3, #KEYS * 2 + 4
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua
--@include shared/line.lua

local ring_count, held, takes_next = #KEYS / 2, whole(ARGV[HELD], 0, MAX_TOTAL), ARGV[TAKES_NEXT]
local rings = ring_count % 1 == 0 and parse_call(now, 3, ring_count)
if not held or (takes_next ~= '0' and takes_next ~= '1') then rings = nil end
for i = 1, rings and ring_count or 0 do
  local ring, line_key = rings[i], KEYS[ring_count + i]
  if line_key ~= ring.key .. ':line' then rings = nil break end
  read_line(ring, line_key, now)
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local admitted = left_after(rings) >= 0
for i = 1, ring_count do
  local ring = rings[i]
  rotate(ring)
  if admitted then
    add_used(ring, ring.cost)
  else
    redis.call('HINCRBY', ring.key, 'block', ring.cost)
  end
end

local reply
if admitted then
  local index, left, reset_ms = binding_ring(rings, now)
  local turn, queued = now, 0
  if takes_next == '1' then
    local last, retry_ms = index, 0
    if left_after(rings) < 0 then
      local _
      last, _, _, retry_ms = refusal(rings, now)
    end
    queued = queued_permits(rings[last], held, now)
    turn = take_turn(rings[last], now + retry_ms, now)
  end
  reply = append_bucket_starts({stamp, left, now, index, reset_ms, turn - now, queued}, rings, now)
else
  local index, left, reset_ms, retry_ms = refusal(rings, now)
  local room_at_ms = now + retry_ms
  local turn = keep_turn(rings[index], held, room_at_ms, now)
    or take_turn(rings[index], room_at_ms, now)
  reply = {stamp, -1, now, index, left, reset_ms, retry_ms, turn - now}
end
for i = 1, ring_count do write_line(rings[i], now) end
return reply
