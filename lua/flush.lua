--- flush: add what a process has counted to the buckets it was counted in, once however often sent.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] now_ms sender seq pull counts...
--- RETURN guard 0 now_ms
--- RETURN guard 0 now_ms (start passed ...)...               if pull is 1: one list a ring
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
--- `counts` of a ring: 'start pass block success error rt_sum rt_min;' for each bucket. What has
--- left the window is dropped. A ring takes each `seq` of a `sender` once; with no sender, always.
local guard, at = ARGV[1], #KEYS * 4 + 3
local given = ARGV[at]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/format.lua
--@include shared/ring.lua

-- The `done` of a bucket and what comes to it.
local function merged(done, success, error, sum, least)
  if success + error == 0 then return done end
  local successes, errors, before, min = string.match(done, '^(%d+) (%d+) (%d+) (%d+)$')
  if not successes then successes, errors, before, min = 0, 0, 0, least end
  return string.format('%.0f %.0f %.0f %.0f',
    successes + success, errors + error, before + sum, math.min(min, least))
end

-- A total beyond MOST would be written with an exponent somewhere, and never leave the window.
local function add(ring, number, pass, block, ...)
  local key, call = ring.key, redis.call
  pass = math.min(pass, MOST - ring.used)
  if number == ring.start / ring.width then
    if block > 0 then call('HINCRBY', key, 'block', block) end
    local done = call('HGET', key, 'done')
    local now_done = merged(done, ...)
    if now_done ~= done then call('HSET', key, 'done', now_done) end
  else
    local slot = number % ring.span
    local passed, blocked, done =
      string.match(call('HGET', key, slot) or '0', '^(%d+) ?(%d*) ?(.*)$')
    if done == '' then done = '0' end
    call('HSET', key, slot, closing(string.format('%.0f', passed + pass),
      string.format('%.0f', (tonumber(blocked) or 0) + block), merged(done, ...)))
    ring.closed = call('HINCRBY', key, 'closed', pass)
  end
  if pass > 0 then count(ring, pass) end
end

-- What all processes have passed, by bucket; on the way, who was last heard of a window ago is
-- forgotten: whatever it may still send has left the window.
local function fleet(ring)
  local key, newest, list, gone = ring.key, ring.start / ring.width, {}, {}
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local slot, seen = tonumber(all[i]), nil
    if slot and slot ~= newest % ring.span then
      local passed = pass(all[i + 1])
      if passed > 0 then
        list[#list + 1] = (newest - (newest - slot) % ring.span) * ring.width
        list[#list + 1] = passed
      end
    elseif not slot then
      seen = string.find(all[i], '^@') and tonumber(string.match(all[i + 1], '%d+$'))
    end
    if seen and seen <= newest - ring.span then gone[#gone + 1] = all[i] end
  end
  for i = 1, #gone, 1000 do
    redis.call('HDEL', key, unpack(gone, i, math.min(i + 999, #gone)))
  end
  list[#list + 1], list[#list + 2] = ring.start, ring.used - ring.closed
  return list
end

local sender, seq, pull = ARGV[at + 1] or '-', ARGV[at + 2] or '', ARGV[at + 3]
local rings, counts = rings_at(now, 5 + #KEYS), {}
if not string.find(sender, '^%x*$') or not string.find(seq, '^%d+$') or seq - 0 > MOST
  or (pull ~= '0' and pull ~= '1') then
  rings = nil
end
for i = 1, rings and #KEYS or 0 do
  local buckets = {}
  -- (`%f[%d]`: a match is tried where a number begins, not at each of its digits.)
  local rest = string.gsub(ARGV[at + 3 + i] or '-',
    '%f[%d](%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+);', function(...)
      local bucket = {...}
      for j = 1, 7 do
        bucket[j] = tonumber(bucket[j])
        if bucket[j] > MOST then return '-' end
      end
      buckets[#buckets + 1] = bucket
      return ''
    end)
  if rest ~= '' then rings = nil break end
  counts[i] = buckets
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

local reply = {guard, 0, now}
for i = 1, #rings do
  local ring, live, field = rings[i], {}, '@' .. sender
  local newest = ring.start / ring.width
  for _, bucket in ipairs(counts[i]) do
    local number = math.min(newest, math.floor(bucket[1] / ring.width))
    if number > newest - ring.span then live[#live + 1], bucket[1] = bucket, number end
  end
  local known = not ring.fresh and sender ~= '' and redis.call('HGET', ring.key, field)
  local new = live[1] and not (known and seq - string.match(known, '^%d+') <= 0)
  local there = new or not ring.fresh
  if new or pull == '1' and there then turn(ring) end
  if new then
    for _, bucket in ipairs(live) do add(ring, unpack(bucket)) end
    if sender ~= '' then
      redis.call('HSET', ring.key, field, string.format('%.0f %.0f', seq, newest))
      if not known then fleet(ring) end
    end
  end
  if pull == '1' then reply[i + 3] = there and fleet(ring) or {} end
end
return reply
