-- A sender's record is 'seq number': the last flush that the ring has taken of it, and the ring's
-- newest bucket then. The record is valid until that bucket has expired: whatever the sender may send
-- again has then expired, too. An expired record is treated as a missing one, so it makes no difference
-- when it is deleted.

-- The counts in `text`, lists of `size` numbers, each of which is written 'number number ...;'. nil if there
-- is anything else in it.
local function parse_counts(text, size)
  local found = {}
  -- (`%f[%d]` has a match tried only where a number begins, not at each of its digits.)
  local pattern = '%f[%d]' .. string.rep('(%d+) ', size - 1) .. '(%d+);'
  local rest = string.gsub(text or '-', pattern, function(...)
    local counts = {...}
    for i = 1, size do
      counts[i] = tonumber(counts[i])
      if counts[i] > MAX_TOTAL then return '-' end
    end
    found[#found + 1] = counts
    return ''
  end)
  return rest == '' and found or nil
end

-- True if the ring has taken this flush before; with it, the number in the sender's record, if any.
local function is_taken(ring, sender, seq)
  local record = redis.call('HGET', ring.senders, sender)
  if not record then return false, nil end
  local last_seq, number = string.match(record, '^(%d+) (%d+)$')
  return seq - last_seq <= 0 and number - ring.start / ring.bucket_ms + ring.span > 0,
    tonumber(number)
end

-- With each new sender this many records are drawn at random, and the expired ones are deleted.
-- (Negative: HRANDFIELD may draw a record twice, which is cheaper.) More than one expired record is
-- deleted on average once a third of them have expired; so there are about 3/2 as many records as
-- valid ones, and a flush costs the same for any number of them.
local DRAWN_RECORDS = -3
-- In a compact hash each lookup walks through all records. From this many records on it is made a hash
-- table, which Redis does for good once it has had a value of more than `hash-max-listpack-value`
-- (64) bytes.
local MAX_COMPACT_RECORDS, LONG_VALUE = 64, string.rep('-', 65)

-- Write the record of this flush; `known_number` is the number in the sender's record so far, or nil.
local function remember_flush(ring, sender, seq, known_number)
  local call, key, newest = redis.call, ring.senders, ring.start / ring.bucket_ms
  call('HSET', key, sender, seq - 0 .. ' ' .. newest)
  -- Once per bucket is enough. (A ring that is ahead of now lives until the clock has caught up.)
  if known_number ~= newest then
    call('PEXPIRE', key, math.max(0, ring.start - now) + (ring.span + 1) * ring.bucket_ms)
  end
  if known_number then return end
  local drawn, oldest = call('HRANDFIELD', key, DRAWN_RECORDS, 'WITHVALUES'), newest - ring.span
  local expired
  for i = 2, #drawn, 2 do
    if string.match(drawn[i], ' (%d+)') - oldest <= 0 then
      expired = expired or {}
      expired[#expired + 1] = drawn[i - 1]
    end
  end
  if expired then call('HDEL', key, unpack(expired)) end
  if call('HLEN', key) == MAX_COMPACT_RECORDS then
    call('HSET', key, LONG_VALUE, '')
    call('HDEL', key, LONG_VALUE)
  end
end
