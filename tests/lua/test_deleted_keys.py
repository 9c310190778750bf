"""No script touches a key that it has deleted, and each reads all its keys before it writes any.

While a slot migrates, its node refuses every access to a key that it does not have. So a script is
refused in the middle if it deletes a key and writes it again, or if a key expires before the script
has read it. As no script does either after its first write, what is refused was not executed
(lua/README.md, "Migrating slots").
"""

from __future__ import annotations

from random import Random

import pytest
import redis

from distwindow.ring.command import load_script
from distwindow.testing.histories import FEATURES, Feature, limits_together
from tests.clock_and_stores import fresh_key

STAMP = "9999999999999.000001"
WATCHED_CALLS = """
local redis = (function()
  local raw, read, deleted, has_written = redis, {}, {}, false
  local writes = {HSET = 1, HINCRBY = 1, HDEL = 1, DEL = 1, PEXPIRE = 1, ZADD = 1, ZREM = 1,
    ZREMRANGEBYSCORE = 1}
  local function call(name, key, ...)
    if name == 'TIME' then return raw.call(name) end
    if deleted[key] then error(name .. ' of a key that was deleted') end
    if not read[key] and has_written then error(name .. ' is the first access, after a write') end
    read[key], has_written = true, has_written or writes[name] ~= nil
    local existed = raw.call('EXISTS', key)
    local reply = raw.call(name, key, ...)
    deleted[key] = existed == 1 and raw.call('EXISTS', key) == 0
    return reply
  end
  return setmetatable({call = call}, {__index = raw})
end)()
"""
"""Raises an error where a script breaks the law. A script calls `redis.call` by this table."""

HISTORIES, COMMANDS = 12, 60
EVERY_FEATURE = {**FEATURES, "together": limits_together()}


@pytest.mark.parametrize("name", EVERY_FEATURE)
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_no_script_touches_a_key_that_it_has_deleted(
    server: redis.Redis, name: str, seed: int
) -> None:
    feature: Feature = EVERY_FEATURE[name]
    history = feature.random_history(Random(seed), COMMANDS)
    for command in feature.commands_of(history, fresh_key()):
        text = WATCHED_CALLS + load_script(command.script).text
        server.eval(text, len(command.keys), *command.keys, STAMP, *command.arguments())
