--- acquire: count `amount` in the newest bucket of every ring, or refuse and count a block in each.
--- KEYS   ring...
--- ARGV   guard (amount limit width shape)... [times] [now_ms] [tell]
--- RETURN guard left now_ms                                           one ring, all admitted
--- RETURN guard left now_ms index reset_ms                            all admitted
--- RETURN guard left now_ms index reset_ms bucket_start_ms...         all admitted, a ring is ahead of now_ms
--- RETURN guard -1 now_ms index left reset_ms retry_ms admitted [index left reset_ms]   refused from `admitted` on
--- RETURN guard -1 now_ms index left reset_ms retry_ms admitted index left reset_ms bucket_start_ms...   and a ring is ahead
--- RETURN guard -2 now_ms                                             past its deadline, nothing done
--- `times` equal calls share this one: amount = times * cost, and as many are admitted as fit.
--- `tell` notes the limit at once, not only when the next bucket opens.
--- Where a ring's newest bucket begins after now_ms (the clock was set back), the reply says in which
--- bucket each ring has counted.
local KEYS, ARGV, call = KEYS, ARGV, redis.call
local guard, given = ARGV[1], ARGV[#KEYS * 4 + 3]
--@include shared/clock.lua

-- The hot path: one ring in its present bucket.
local key, start, cost, age, opened, width = KEYS[1], nil, nil, nil, nil, nil
if not KEYS[2] then
  local amount, limit, shape, times = ARGV[2], ARGV[3] - 0, ARGV[5], ARGV[6]
  start = call('HGET', key, 'start')
  cost, width = amount / (times or 1), ARGV[4] - 0
  if start and not ARGV[8] and now - guard <= 0 and cost >= 1 and (not times or cost % 1 == 0) and width <= 1e13
    and string.find(shape, '^[1-9]%d?%d?%+?1?$') then
    if #start < 17 then
      opened, age = start, now - start
      if age >= 0 and age < width then
        -- Counting first and taking back costs one call less than reading first.
        local left = limit - call('HINCRBY', key, 'used', amount)
        if left >= 0 and left <= 1e13 then return {guard, left, now} end
        call('HINCRBY', key, 'used', '-' .. amount)
      end
    else
      -- `start` is a note: what the last refusal was told. It is true of the same limit and of any
      -- cost from `least` to `least + reach` until the bucket ends; what still fits moves `least`.
      local limit, left, least, reach, room, empty
      opened, limit, left, least, reach, room, empty =
        string.match(start, '^(%d+) (%d+) (%-?%d+) (%d+) (%d+) (%d+) (%d+)$')
      age = now - opened
      if age >= 0 and age < width and limit == ARGV[3] then
        if cost - least >= 0 and cost - least - reach <= 0 then
          call('HINCRBY', key, 'block', amount)
          return {guard, -1, now, 1, left - 0, empty - age, room - age, 0}
        elseif left - amount >= 0 then
          call('HINCRBY', key, 'used', amount)
          left, least = left - amount, least - amount
          empty = (tonumber(shape) or string.match(shape, '%d+') + 1) * width
          call('HSET', key, 'start',
            table.concat({opened, limit, left, least, reach, room, empty}, ' '))
          return {guard, left, now}
        end
      end
    end
  end
end

--@include shared/deadline.lua
--@include shared/format.lua

-- One ring whose newest bucket is over: the usual case of a key that is called now and then. The
-- newest is closed into its slot, what has left the window meanwhile (some slots, or everything)
-- is taken out of the total, and the bucket of now opens.
if (start == false or age and age >= width) and cost >= 1 and cost % 1 == 0
  and tonumber(ARGV[6] or 1) % 1 == 0 and not string.find(given or '', '%D') and not ARGV[9] then
  local amount, limit, width, span, told = arguments(1)
  local begin = amount and amount >= 1 and now - now % width
  local steps = begin and start and (begin - opened) / width or 0
  if begin and (not start or steps >= span) then
    if limit - amount >= 0 then
      if start then call('DEL', key) end
      call('HSET', key, 'start', begin, 'used', amount, 'closed', '0',
        'block', '0', 'done', '0', 'limit', told)
      call('PEXPIRE', key, (span + 1) * width)
      return {guard, limit - amount, now}
    end
  elseif begin and steps <= 8 and steps % 1 == 0 then
    local number, fields = begin / width, {'used', 'closed', 'block', 'done'}
    for i = 1, steps do fields[i + 4] = (number - steps + i) % span end
    local head = call('HMGET', key, unpack(fields))
    local last, closed, gone = head[1] - head[2], head[1] - 0, {}
    for i = 1, steps do
      closed = closed - pass(head[i + 4])
      if head[i + 4] and i < steps then gone[#gone + 1] = fields[i + 4] end
    end
    local left, bucket = limit - closed - amount, closing(last, head[3], head[4])
    if left >= 0 then
      if gone[1] then call('HDEL', key, unpack(gone)) end
      if bucket ~= last then call('HSET', key, 'block', '0', 'done', '0') end
      call('HSET', key, 'start', begin, 'used', closed + amount, 'closed', closed,
        'limit', told, (number - steps) % span, bucket)
      call('PEXPIRE', key, (span + 1) * width)
      return {guard, left, now}
    end
  end
end

--@include shared/ring.lua
--@include shared/verdict.lua

local rings, times = rings_at(now, 3), tonumber(ARGV[#KEYS * 4 + 2] or 1)
local admitted = times
for i = 1, rings and #rings or 0 do
  local ring = rings[i]
  ring.cost = times and times % 1 == 0 and ring.amount / times or 0
  if not (ring.cost >= 1 and ring.cost % 1 == 0) then rings = nil break end
  admitted = math.max(0, math.min(admitted, math.floor((ring.limit - ring.used) / ring.cost)))
end
if not rings then return redis.error_reply('ERR distwindow: malformed arguments') end

for i = 1, #rings do
  local ring = rings[i]
  turn(ring)
  if ARGV[#KEYS * 4 + 4] then call('HSET', ring.key, 'limit', ring.told) end
  if admitted > 0 then count(ring, ring.cost * admitted) end
  if admitted < times then
    call('HINCRBY', ring.key, 'block', ring.cost * (times - admitted))
  end
end

if admitted == times then
  local index, left, reset = binding(rings, now)
  return with_starts({guard, left, now, index, reset}, rings, now)
end
local index, left, reset, retry = refusal(rings, now)
if admitted > 0 then
  return with_starts(
    {guard, -1, now, index, left, reset, retry, admitted, binding(rings, now)}, rings, now)
end
local ring = rings[1]
if not rings[2] and ring.over and reset > 0 then
  local least, age = math.max(1, left + ring.over + 1), now - ring.start
  local reach = math.min(ring.limit, left + ring.upto - least)
  local note = string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f',
    ring.start, ring.limit, left, least, reach, retry + age, reset + age)
  -- Longer values than 64 bytes would cost the hash its compact encoding.
  if #note <= 61 and reach >= 0 then call('HSET', key, 'start', note) end
end
return {guard, -1, now, index, left, reset, retry, 0}
