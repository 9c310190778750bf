--- flush: add what a process has counted to the buckets it was counted in, once however often sent.
--- KEYS   ring... senders...
--- ARGV   guard (amount limit width shape)... [times] now_ms sender seq pull counts...
--- RETURN guard 0 now_ms
--- RETURN guard 0 now_ms (start passed ...)...               if pull is 1: one list a ring
--- RETURN guard -2 now_ms                                    past its deadline, nothing done
--- `counts` of a ring: 'start pass block success error rt_sum rt_min;' for each bucket. What has
--- left the window is dropped. A ring takes each `seq` of a `sender` once; with no sender, always.
--- `senders` of a ring: the hash `<ring>:senders`, in which it remembers what it has taken of whom.
local guard, many = ARGV[1], #KEYS / 2
local at = many * 4 + 3
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

-- What all processes have passed, by bucket.
local function fleet(ring)
  local newest, list = ring.start / ring.width, {}
  local all = redis.call('HGETALL', ring.key)
  for i = 1, #all, 2 do
    local slot = tonumber(all[i])
    if slot and slot ~= newest % ring.span then
      local passed = pass(all[i + 1])
      if passed > 0 then
        list[#list + 1] = (newest - (newest - slot) % ring.span) * ring.width
        list[#list + 1] = passed
      end
    end
  end
  list[#list + 1], list[#list + 2] = ring.start, ring.used - ring.closed
  return list
end

-- A sender's record is 'seq number': the last flush that the ring has taken of it, and its newest
-- bucket then. The record holds until that bucket has left the window: whatever the sender may send
-- again has then left it, too. After that it counts as none, so nobody can tell when it is deleted.

-- Has the ring taken this flush before? With it, the number in the sender's record, if there is one.
local function taken(ring, sender, seq)
  local record = redis.call('HGET', ring.senders, sender)
  if not record then return false, nil end
  local last, number = string.match(record, '^(%d+) (%d+)$')
  return seq - last <= 0 and number - ring.start / ring.width + ring.span > 0, tonumber(number)
end

-- With each sender that comes, so many records are drawn at random (negative: the same one perhaps
-- twice, which is cheaper), and those that no longer hold are deleted. That is more than one on
-- average as soon as a third of all does not hold: so there are about 3/2 of those that do, and a
-- flush costs the same for any number of them.
local DRAWN = -3
-- In a compact hash each call walks through all records. Beyond so many it is made a table, which
-- Redis does for good once it has had a value of more than `hash-max-listpack-value` (64) bytes.
local COMPACT, LONG = 64, string.rep('-', 65)

-- Remember that the ring has taken this flush; `before` is the number in the sender's record so far.
local function remember(ring, sender, seq, before)
  local call, key, newest = redis.call, ring.senders, ring.start / ring.width
  call('HSET', key, sender, seq - 0 .. ' ' .. newest)
  -- Once in a bucket will do. (A ring that is ahead of now lives until the clock has caught up.)
  if before ~= newest then
    call('PEXPIRE', key, math.max(0, ring.start - now) + (ring.span + 1) * ring.width)
  end
  if before then return end
  local drawn, oldest, gone = call('HRANDFIELD', key, DRAWN, 'WITHVALUES'), newest - ring.span, nil
  for i = 2, #drawn, 2 do
    if string.match(drawn[i], ' (%d+)') - oldest <= 0 then
      gone = gone or {}
      gone[#gone + 1] = drawn[i - 1]
    end
  end
  if gone then call('HDEL', key, unpack(gone)) end
  if call('HLEN', key) == COMPACT then
    call('HSET', key, LONG, '')
    call('HDEL', key, LONG)
  end
end

local sender, seq, pull = ARGV[at + 1] or '-', ARGV[at + 2] or '', ARGV[at + 3]
local rings, counts = many % 1 == 0 and rings_at(now, 5 + many, many), {}
if not string.find(sender, '^%x*$') or not string.find(seq, '^%d+$') or seq - 0 > MOST
  or (pull ~= '0' and pull ~= '1') then
  rings = nil
end
for i = 1, rings and many or 0 do
  local buckets = {}
  rings[i].senders = rings[i].key .. ':senders'
  if KEYS[many + i] ~= rings[i].senders then rings = nil break end
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

for i = 1, many do
  local ring, live = rings[i], {}
  local newest = ring.start / ring.width
  for _, bucket in ipairs(counts[i]) do
    local number = math.min(newest, math.floor(bucket[1] / ring.width))
    if number > newest - ring.span then live[#live + 1], bucket[1] = bucket, number end
  end
  ring.live, ring.new = live, live[1]
  if ring.new and sender ~= '' then
    local again
    again, ring.before = taken(ring, sender, seq)
    ring.new = not again
  end
end

local reply = {guard, 0, now}
for i = 1, many do
  local ring = rings[i]
  local there = ring.new or not ring.fresh
  if ring.new or pull == '1' and there then turn(ring) end
  if ring.new then
    for _, bucket in ipairs(ring.live) do add(ring, unpack(bucket)) end
    if sender ~= '' then remember(ring, sender, seq, ring.before) end
  end
  if pull == '1' then reply[i + 3] = there and fleet(ring) or {} end
end
return reply
