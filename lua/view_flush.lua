--- view_flush: add what the entries of a process did to the minute views of a key, once however often sent.
--- KEYS   views senders
--- ARGV   stamp now_ms sender seq max_origins (origin counts)...
--- RETURN stamp taken now_ms                                 1 if the counts were added
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `counts` of an origin: 'second pass block success error rt_sum_ms rt_min_ms;' for each second. With
--- an empty origin they are of entries without one. Seconds that are over a minute old are dropped. All
--- counts are added to the view of all entries, too. An origin that has no view gets one if fewer than
--- max_origins were called in the last minute, and is counted under '(other)' if not. The views take
--- each `seq` of a `sender` once; with an empty sender they take every flush.
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/numbers.lua
--@include shared/senders.lua

local MAX_ORIGINS, MAX_ORIGIN_BYTES, SECONDS = 1000, 512, 60
local ALL, OTHER = '', '(other)'
local call, key = redis.call, KEYS[1]

-- The second in which a view was last counted in: the first word of its value. nil for no view.
local function last_second(value) return value and tonumber(string.match(value, '^%d+')) end

local sender, max_origins = ARGV[3] or '-', whole(ARGV[5], 1, MAX_ORIGINS)
local pairs_count = (#ARGV - 5) / 2
local is_valid = max_origins and #KEYS == 2 and KEYS[2] == key .. ':senders' and pairs_count >= 1
  and pairs_count % 1 == 0 and string.find(sender, '^%x*$') and whole(ARGV[4], 0)
  and now >= 0 and now <= MAX_TOTAL and not string.find(client_now or '-', '%D')
local counted = {}
for i = 1, is_valid and pairs_count or 0 do
  local origin, seconds = ARGV[4 + 2 * i], parse_counts(ARGV[5 + 2 * i], 7)
  is_valid = is_valid and seconds and #origin <= MAX_ORIGIN_BYTES
  counted[i] = {origin = origin, seconds = seconds}
end
if not is_valid then return redis.error_reply(MALFORMED) end

-- Time never goes back: the newest second is that of now, or the last one that was counted in. Views
-- that are ahead of now by more than a minute (the clock was set back far) are treated as empty.
local newest = math.floor(now / 1000)
local stored = last_second(call('HGET', key, ALL))
local is_far_ahead = stored and stored - newest > SECONDS
if stored and not is_far_ahead then newest = math.max(newest, stored) end

-- Decide, before anything is written, what is taken, and under which name.
local any_live = false
for _, each in ipairs(counted) do
  local live = {}
  for _, second in ipairs(each.seconds) do
    second[1] = math.min(newest, second[1])
    if second[1] > newest - SECONDS then live[#live + 1], any_live = second, true end
  end
  each.seconds = live
end
local senders = {senders = KEYS[2], start = newest * 1000, bucket_ms = 1000, span = SECONDS}
local taken, known_number = not any_live, nil
if any_live and sender ~= '' then
  taken, known_number = is_taken(senders, sender, ARGV[4])
end
if taken then return {stamp, 0, now} end

-- The value of a view, read once; nil if there is none.
local values = {}
local function stored_view(name)
  if values[name] == nil then values[name] = not is_far_ahead and call('HGET', key, name) end
  return values[name] or nil
end

local named = is_far_ahead and 0 or call('HLEN', key)
for _, name in ipairs({ALL, OTHER}) do
  if stored_view(name) then named = named - 1 end
end
local has_view, expired = {[ALL] = true, [OTHER] = true}, nil

-- True if there is room for one more origin. Where there is none, the views of origins that were not
-- called in the last minute make room.
local function has_room()
  if named < max_origins then return true end
  if not expired then
    expired = {}
    local all = is_far_ahead and {} or call('HGETALL', key)
    for i = 1, #all, 2 do
      local last = not has_view[all[i]] and last_second(all[i + 1])
      if last and last <= newest - SECONDS then
        expired[#expired + 1], expired[all[i]], values[all[i]] = all[i], true, false
      end
    end
    named = named - #expired
  end
  return named < max_origins
end

for _, each in ipairs(counted) do
  local name = each.origin
  if each.seconds[1] and not has_view[name] then
    local known = stored_view(name)
    local last = last_second(known)
    if last and last > newest - SECONDS then
      has_view[name] = true
    elseif has_room() then
      if not known or expired and expired[name] then named = named + 1 end
      has_view[name] = true
    else
      each.origin = OTHER
    end
  end
end

-- Add `seconds` to a view: 'second pass block success error rt_sum_ms rt_min_ms;' for each second, the
-- newest first, so that only the last few are parsed. What has expired is cut off when a second opens.
local function add_to_view(name, seconds)
  local value, at, oldest = stored_view(name) or '', 1, newest
  for _, second in ipairs(seconds) do oldest = math.min(oldest, second[1]) end
  local by_number, numbers, is_opened = {}, {}, false
  while true do
    local _, stop, number, pass, block, success, error, rt_sum, rt_min =
      string.find(value, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+);', at)
    number = number and tonumber(number)
    if not number or number < oldest then break end
    by_number[number] = {number, pass + 0, block + 0, success + 0, error + 0, rt_sum + 0, rt_min + 0}
    numbers[#numbers + 1], at = number, stop + 1
  end
  for _, added in ipairs(seconds) do
    local number = added[1]
    local known = by_number[number]
    if not known then
      known, is_opened = {number, 0, 0, 0, 0, 0, 0}, true
      by_number[number], numbers[#numbers + 1] = known, number
    end
    -- A second in which no call ended has no least response time.
    if known[4] + known[5] == 0 then
      known[7] = added[4] + added[5] > 0 and added[7] or 0
    elseif added[4] + added[5] > 0 then
      known[7] = math.min(known[7], added[7])
    end
    for j = 2, 6 do known[j] = math.min(known[j] + added[j], MAX_TOTAL) end
  end
  table.sort(numbers, function(one, two) return one > two end)
  local words = {}
  for i, number in ipairs(numbers) do
    words[i] = string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f;', unpack(by_number[number]))
  end
  local rest = string.sub(value, at)
  if is_opened then
    local cut = 1
    for number, stop in string.gmatch(rest, '(%d+)[%d ]*;()') do
      if number - newest + SECONDS <= 0 then break end
      cut = stop
    end
    rest = string.sub(rest, 1, cut - 1)
  end
  call('HSET', key, name, table.concat(words) .. rest)
end

local total, by_name, names = {}, {}, {}
for _, each in ipairs(counted) do
  local name = each.origin
  for _, second in ipairs(each.seconds) do
    total[#total + 1] = second
    if name ~= ALL then
      if not by_name[name] then by_name[name], names[#names + 1] = {}, name end
      by_name[name][#by_name[name] + 1] = second
    end
  end
end
if is_far_ahead then
  -- All but the view that is written next, so that the hash is never empty (lua/README.md, "Migrating slots").
  local all, others = call('HGETALL', key), {}
  for i = 1, #all, 2 do
    if all[i] ~= ALL then others[#others + 1] = all[i] end
  end
  if others[1] then call('HDEL', key, unpack(others)) end
elseif expired and expired[1] then
  call('HDEL', key, unpack(expired))
end
add_to_view(ALL, total)
for _, name in ipairs(names) do add_to_view(name, by_name[name]) end
call('PEXPIRE', key, math.max(0, newest * 1000 - now) + (SECONDS + 1) * 1000)
if sender ~= '' then remember_flush(senders, sender, ARGV[4], known_number) end
return {stamp, 1, now}
