-- What comes and is kept as text. Numbers are whole and at most 1e13: sums stay exact, and both
-- redis.call (%.17g) and `..` (%.14g) write them in plain digits.
local MOST = 1e13

-- Ring i of the call: amount, limit, width, span, and the limit as its hash keeps it (negative when
-- strict). Nothing where that is not what we send. The shape is '10' for ten buckets (leap), '10+1'
-- for one more in the sum (strict).
local function arguments(i)
  local at = 4 * i - 2
  local amount, limit, width, shape = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if not shape then return nil end
  local buckets, more, told = shape, 0, limit
  if not tonumber(shape) then
    buckets, more, told = string.match(shape, '^(%d+)%+1$') or '', 1, '-' .. limit
  end
  if string.find(amount .. limit .. width .. buckets, '%D') then return nil end
  amount, limit, width, buckets = tonumber(amount), tonumber(limit), tonumber(width), tonumber(buckets)
  if amount and limit and width and buckets and amount <= MOST and limit <= MOST
    and width >= 1 and width <= MOST and buckets >= 1 and buckets <= 512 then
    return amount, limit, width, buckets + more, told
  end
end

-- A closed bucket: 'pass', 'pass block' or 'pass block success error rt min_rt'.
local function closing(pass, block, done)
  if done ~= '0' then return pass .. ' ' .. block .. ' ' .. done end
  if block ~= '0' then return pass .. ' ' .. block end
  return pass
end

local function pass(bucket)
  return bucket and (tonumber(bucket) or tonumber(string.match(bucket, '^%d+'))) or 0
end
