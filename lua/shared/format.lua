-- Arguments and stored values as text. Numbers are whole and at most MAX_TOTAL: so sums stay exact,
-- and both redis.call (%.17g) and `..` (%.14g) write them in plain digits.
local MAX_TOTAL = 1e13

-- `text` as a whole number in plain digits, from `least` to `most`; nil or false for anything else.
local function whole(text, least, most)
  local number = string.find(text or '-', '^%d+$') and tonumber(text)
  return number and number >= least and number <= most and number
end

-- The arguments of ring i: permits, limit, bucket_ms, span, and the limit as the hash's field `limit`
-- has it (negative when strict). nil if they are malformed. The shape is '10' for ten buckets (leap),
-- '10+1' where one more bucket is summed (strict).
local function ring_arguments(i)
  local at = 4 * i - 2
  local permits, limit, bucket_ms, shape = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if not shape then return nil end
  local buckets, added, limit_field = shape, 0, limit
  if not tonumber(shape) then
    buckets, added, limit_field = string.match(shape, '^(%d+)%+1$') or '', 1, '-' .. limit
  end
  if string.find(permits .. limit .. bucket_ms .. buckets, '%D') then return nil end
  permits, limit, bucket_ms, buckets =
    tonumber(permits), tonumber(limit), tonumber(bucket_ms), tonumber(buckets)
  if permits and limit and bucket_ms and buckets and permits <= MAX_TOTAL and limit <= MAX_TOTAL
    and bucket_ms >= 1 and bucket_ms <= MAX_TOTAL and buckets >= 1 and buckets <= 512 then
    return permits, limit, bucket_ms, buckets + added, limit_field
  end
end

-- A closed bucket as its slot holds it: 'pass', 'pass block' or
-- 'pass block success error rt_sum_ms rt_min_ms'.
local function encode_bucket(pass, block, finished)
  if finished ~= '0' then return pass .. ' ' .. block .. ' ' .. finished end
  if block ~= '0' then return pass .. ' ' .. block end
  return pass
end

-- The permits that passed in a closed bucket, from the value of its slot; 0 for a missing slot.
local function passed_in(bucket)
  return bucket and (tonumber(bucket) or tonumber(string.match(bucket, '^%d+'))) or 0
end
