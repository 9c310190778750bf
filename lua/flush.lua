--- flush: add what a process has counted to the buckets it was counted in, once however often sent.
--- KEYS   ring... senders...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] now_ms sender seq pull counts...
--- RETURN stamp 0 now_ms
--- RETURN stamp 0 now_ms (start passed ...)...               if pull is 1: one list a ring
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `counts` of a ring: 'start pass block success error rt_sum_ms rt_min_ms;' for each bucket. Buckets
--- that have expired are dropped. A ring takes each `seq` of a `sender` once; with an empty sender it
--- takes every flush. `senders` of a ring: the hash `<ring>:senders`, with the last flush that the
--- ring has taken of each sender.
local ring_count = #KEYS / 2
-- The positions of the arguments that follow those of the rings. The first counts follow PULL.
local NOW = ring_count * 4 + 3
local SENDER, SEQ, PULL = NOW + 1, NOW + 2, NOW + 3
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

-- The field `finished` with more finished calls added to it.
local function add_finished(finished, success, error, rt_sum_ms, rt_min_ms)
  if success + error == 0 then return finished end
  local successes, errors, rt_sum, rt_min = string.match(finished, '^(%d+) (%d+) (%d+) (%d+)$')
  if not successes then successes, errors, rt_sum, rt_min = 0, 0, 0, rt_min_ms end
  return string.format('%.0f %.0f %.0f %.0f',
    successes + success, errors + error, rt_sum + rt_sum_ms, math.min(rt_min, rt_min_ms))
end

-- Add counts to the bucket of this number. No total grows beyond MAX_TOTAL: a larger one would be
-- written with an exponent, and could not be subtracted from the total when its bucket expires.
local function add_counts(ring, number, pass, block, ...)
  local key, call = ring.key, redis.call
  pass = math.min(pass, MAX_TOTAL - ring.used)
  if number == ring.start / ring.bucket_ms then
    if block > 0 then call('HINCRBY', key, 'block', block) end
    local finished = call('HGET', key, 'finished')
    local new_finished = add_finished(finished, ...)
    if new_finished ~= finished then call('HSET', key, 'finished', new_finished) end
  else
    local slot = number % ring.span
    local passed, blocked, finished =
      string.match(call('HGET', key, slot) or '0', '^(%d+) ?(%d*) ?(.*)$')
    if finished == '' then finished = '0' end
    call('HSET', key, slot, encode_bucket(string.format('%.0f', passed + pass),
      string.format('%.0f', (tonumber(blocked) or 0) + block), add_finished(finished, ...)))
    ring.closed = call('HINCRBY', key, 'closed', pass)
  end
  if pass > 0 then add_used(ring, pass) end
end

-- The passes of all processes in the window: {bucket start, passed, ...}.
local function fleet_counts(ring)
  local newest, list = ring.start / ring.bucket_ms, {}
  local all = redis.call('HGETALL', ring.key)
  for i = 1, #all, 2 do
    local slot = tonumber(all[i])
    if slot and slot ~= newest % ring.span then
      local passed = passed_in(all[i + 1])
      if passed > 0 then
        list[#list + 1] = (newest - (newest - slot) % ring.span) * ring.bucket_ms
        list[#list + 1] = passed
      end
    end
  end
  list[#list + 1], list[#list + 2] = ring.start, ring.used - ring.closed
  return list
end

--@include shared/senders.lua

local sender, seq, pull = ARGV[SENDER] or '-', ARGV[SEQ] or '', ARGV[PULL]
local rings, counts = ring_count % 1 == 0 and parse_rings(now, 5 + ring_count, ring_count), {}
if not string.find(sender, '^%x*$') or not whole(seq, 0, MAX_TOTAL)
  or (pull ~= '0' and pull ~= '1') then
  rings = nil
end
for i = 1, rings and ring_count or 0 do
  rings[i].senders = rings[i].key .. ':senders'
  if KEYS[ring_count + i] ~= rings[i].senders then rings = nil break end
  counts[i] = parse_counts(ARGV[PULL + i], 7)
  if not counts[i] then rings = nil break end
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

-- Decide, before anything is written, which rings take this flush: those that have not taken it
-- before, of which at least one bucket is in the window. A start beyond the newest bucket counts in it.
for i = 1, ring_count do
  local ring, live = rings[i], {}
  local newest = ring.start / ring.bucket_ms
  for _, bucket in ipairs(counts[i]) do
    local number = math.min(newest, math.floor(bucket[1] / ring.bucket_ms))
    if number > newest - ring.span then live[#live + 1], bucket[1] = bucket, number end
  end
  ring.live_counts, ring.takes = live, live[1]
  if ring.takes and sender ~= '' then
    local taken
    taken, ring.known_number = is_taken(ring, sender, seq)
    ring.takes = not taken
  end
end

local reply = {stamp, 0, now}
for i = 1, ring_count do
  local ring = rings[i]
  local exists = ring.takes or not ring.is_empty
  if ring.takes or pull == '1' and exists then rotate(ring) end
  if ring.takes then
    for _, bucket in ipairs(ring.live_counts) do add_counts(ring, unpack(bucket)) end
    if ring.last then rewrite_head(ring) end
    if sender ~= '' then remember_flush(ring, sender, seq, ring.known_number) end
  end
  if pull == '1' then reply[i + 3] = exists and fleet_counts(ring) or {} end
end
return reply
