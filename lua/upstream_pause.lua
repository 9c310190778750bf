--- upstream_pause: ask whether calls of an upstream may be sent, or tell what it has answered.
--- KEYS   pause
--- ARGV   stamp now_ms what call first_ms second_ms jitter   what: ask, tell, ok or free
--- RETURN stamp 0 now_ms                                     send
--- RETURN stamp 1 now_ms                                     send, as the only one of the fleet: the probe
--- RETURN stamp 2 now_ms wait_ms said_ms                     nobody sends for wait_ms; the upstream said said_ms
--- RETURN stamp 3 now_ms wait_ms longest_ms                  ask again after wait_ms, and for longest_ms at most
--- RETURN stamp 4 now_ms                                     send this call; ask for the next one, too
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `ask`: first_ms is for how long this call is the probe. `tell`: it was refused; for first_ms (0: not said),
--- at most second_ms, and `jitter` thousandths longer. `ok`: the call that was made the probe at first_ms
--- was not refused. `free`: it has had no answer.
local stamp, client_now = ARGV[1], ARGV[2]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/numbers.lua
-- distwindow/upstream/memory.py has the table of states, and these numbers.
local FIRST_PAUSE_MS, REMEMBERED_MS, STEP_MS, MAX_STEPS, MAX_DOUBLINGS = 1000, 60000, 100, 10, 30

local key, call, what, id = KEYS[1], redis.call, ARGV[3], ARGV[4]
local first, second, jitter = whole(ARGV[5], 0), whole(ARGV[6], 0), whole(ARGV[7], 0, 1000)
if #KEYS ~= 1 or not first or not second or not jitter or not string.find(id, '^%w+$')
  or client_now ~= '' and not whole(client_now, 0)
  or what ~= 'ask' and what ~= 'tell' and what ~= 'ok' and what ~= 'free' then
  return redis.error_reply(MALFORMED)
end

local values = call('HMGET', key, 'until', 'said', 'in_a_row', 'probe', 'probe_until', 'returns_at', 'returned', 'expires_at')
if values[1] and now >= values[8] - 0 then values = {} end
local until_ms, said = (values[1] or 0) - 0, (values[2] or 0) - 0
local in_a_row, probe, probe_until = (values[3] or 0) - 0, values[4] or '', (values[5] or 0) - 0
local returns_at, returned = (values[6] or 0) - 0, (values[7] or 0) - 0

-- Keep what is known until then, ms since the epoch. It is deleted later, as clocks of clients differ.
local function keep(expires_at)
  call('HSET', key, 'expires_at', digits(expires_at))
  call('PEXPIRE', key, digits(expires_at - now + REMEMBERED_MS))
end

if what == 'tell' then
  local is_paused = now < until_ms
  if returns_at > 0 then in_a_row = 1 elseif not is_paused then in_a_row = in_a_row + 1 end
  local wait = first
  if wait == 0 and not is_paused then
    wait = math.min(second, FIRST_PAUSE_MS * 2 ^ math.min(in_a_row - 1, MAX_DOUBLINGS))
  end
  until_ms = math.max(until_ms, now + math.min(wait + math.floor(wait * jitter / 1000), second))
  said = math.max(said, now + wait)
  call('HSET', key, 'until', digits(until_ms), 'said', digits(said),
    'in_a_row', in_a_row, 'probe', '', 'returns_at', '0')
  keep(until_ms + REMEMBERED_MS)
  return {stamp, 2, now, until_ms - now, math.max(until_ms, said) - now}
end
if not values[1] then return {stamp, 0, now} end
if what ~= 'ask' then
  if what == 'ok' and first >= until_ms and returns_at == 0 then
    call('HSET', key, 'probe', '', 'returns_at', digits(now), 'returned', '0')
    keep(now + STEP_MS * MAX_STEPS)
  elseif probe == id then
    call('HSET', key, 'probe', '')
  end
  return {stamp, 0, now}
end
if now < until_ms then return {stamp, 2, now, until_ms - now, math.max(until_ms, said) - now} end
if returns_at > 0 then
  local steps = math.max(0, math.floor((now - returns_at) / STEP_MS)) + 1
  if returned >= 2 ^ steps - 1 then
    local wait = returns_at + steps * STEP_MS - now
    return {stamp, 3, now, wait, wait}
  end
  call('HINCRBY', key, 'returned', 1)
  return {stamp, 4, now}
end
if probe ~= '' and probe ~= id and now < probe_until then
  return {stamp, 3, now, math.min(STEP_MS, probe_until - now), probe_until - now}
end
call('HSET', key, 'probe', id, 'probe_until', digits(now + first))
keep(now + first + REMEMBERED_MS)
return {stamp, 1, now}
