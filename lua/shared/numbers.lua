-- Numbers of circuit breakers, views and pauses: whole and at most MAX_TOTAL, so that sums stay exact.
local MAX_TOTAL = 1e13
local MALFORMED = 'ERR distwindow: malformed arguments'

-- `number` in plain digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- `word` as a whole number from `least` to `most` (nil: MAX_TOTAL); nil for anything else.
local function whole(word, least, most)
  if not word or not string.find(word, '^%d+$') then return nil end
  local number = tonumber(word)
  return number and number >= least and number <= (most or MAX_TOTAL) and number or nil
end
