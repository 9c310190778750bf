--- breaker_probe: hand out a probe of a breaker that is not closed, renew one, or end one; open or close a
--- breaker by hand.
--- KEYS   breaker senders
--- ARGV   stamp measure threshold min_calls open_ms probe_ms probes bucket_ms buckets now_ms action probe_id
--- RETURN stamp done now_ms state epoch retry_in_ms total bad
--- RETURN stamp -2 now_ms                                    past its deadline, nothing done
--- `action`: `take` a probe; `renew` it, as its process lives; `succeed` and `fail`, as it ended; `free`
--- it, where its end says nothing; `open` and `close` the breaker, whatever its state and the id are. Each may be sent
--- again: a probe that was handed out is handed out to the same id again, and the end of one that is not under way
--- changes nothing. `state`: 0 closed, 1 open, 2 half-open.
local stamp, client_now = ARGV[1], ARGV[10]
--@include shared/clock.lua
--@include shared/deadline.lua
--@include shared/numbers.lua
--@include shared/breaker.lua

local action, probe_id = ARGV[11], ARGV[12] or ''
local breaker = parse_breaker()
if not breaker or #ARGV ~= 12 or not string.find(probe_id, '^[%x.]+$') or #probe_id > 64
  or action ~= 'take' and action ~= 'renew' and action ~= 'succeed' and action ~= 'fail'
  and action ~= 'free' and action ~= 'open' and action ~= 'close' then
  return redis.error_reply(MALFORMED)
end
local key, field = breaker.key, 'p:' .. probe_id

if action == 'take' then
  if breaker.state == CLOSED or breaker.state == OPEN and retry_in_ms(breaker) > 0 then
    return breaker_reply(stamp, breaker, 0)
  end
  local alive, count = alive_probes(breaker)
  if breaker.state == HALF_OPEN and not breaker.deadlines[probe_id]
    and count + breaker.in_a_row >= breaker.probes then
    return breaker_reply(stamp, breaker, 0)
  end
  if breaker.state == OPEN then change(breaker, HALF_OPEN) end
  for other in pairs(breaker.deadlines) do
    if not alive[other] then redis.call('HDEL', key, 'p:' .. other) end
  end
  alive[probe_id] = now + breaker.probe_ms
  breaker.deadlines = breaker.state == HALF_OPEN and alive
  redis.call('HSET', key, field, digits(alive[probe_id]))
  keep(breaker)
  return breaker_reply(stamp, breaker, 1)
end

if action == 'open' or action == 'close' then
  delete_expired(breaker)
  if action == 'open' then open(breaker) else close(breaker) end
  return breaker_reply(stamp, breaker, 1)
end
if breaker.state ~= HALF_OPEN or not breaker.deadlines[probe_id] then
  return breaker_reply(stamp, breaker, 0)
end
if action == 'renew' then
  breaker.deadlines[probe_id] = now + breaker.probe_ms
  redis.call('HSET', key, field, digits(breaker.deadlines[probe_id]))
  keep(breaker)
  return breaker_reply(stamp, breaker, 1)
end
redis.call('HDEL', key, field)
breaker.deadlines[probe_id] = nil
if action == 'fail' then
  open(breaker)
  return breaker_reply(stamp, breaker, 1)
end
if action == 'succeed' then breaker.in_a_row = breaker.in_a_row + 1 end
if breaker.in_a_row >= breaker.probes then
  close(breaker)
else
  keep(breaker)
end
return breaker_reply(stamp, breaker, 1)
