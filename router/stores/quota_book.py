"""The book of shares in Redis, for the quotas of all routers: `admission/sharing.py` as a script.

No library serves here. `limits` and its like ask Redis about each request; here a process asks in the background for
what its next requests may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.admission.sharing import ROW_TTL_S, SILENT_S, CeilingReport, Grant, Grants
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.scripts import MAX_ROWS, NOW

_KEPT_MS = 120_000
"""Keys that nobody uses expire after this time."""

EXCHANGE_SHARES: Final = f"""{NOW}
-- KEYS members meter...; ARGV member, then for each meter: limit used wanted
local ttl_ms, silent_ms, alive = {int(ROW_TTL_S * 1000)}, {int(SILENT_S * 1000)}, {{}}
local function text(number) return string.format('%.0f', number) end
local member, answer = ARGV[1], {{0}}
for _, key in ipairs(KEYS) do
  if redis.call('HLEN', key) > {MAX_ROWS} then redis.call('UNLINK', key) end
end
local function number(digits) return math.min(tonumber(digits), 1e15) end
local function is_gone(row_ms) return not row_ms or math.abs(now_ms - number(row_ms)) > ttl_ms end
redis.call('HSET', KEYS[1], member, text(now_ms))
redis.call('PEXPIRE', KEYS[1], {_KEPT_MS})
local members = redis.call('HGETALL', KEYS[1])
for i = 1, #members, 2 do
  if is_gone(string.match(members[i + 1], '^%d+$')) then
    redis.call('HDEL', KEYS[1], members[i])
  else
    answer[1] = answer[1] + 1
    alive[members[i]] = tonumber(members[i + 1]) + silent_ms >= now_ms
  end
end
for meter = 2, #KEYS do
  local at = 3 * meter - 4
  local limit, used, wanted = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local free, others_used, key = limit, 0, KEYS[meter]
  local rows = redis.call('HGETALL', key)
  for i = 1, #rows, 2 do
    if rows[i] ~= member then
      local row_used, row_ceiling, row_ms = string.match(rows[i + 1], '^(%d+) (%d+) (%d+)$')
      if is_gone(row_ms) then
        redis.call('HDEL', key, rows[i])
      else
        free = free - number(alive[rows[i]] and row_ceiling or row_used)
        others_used = others_used + number(row_used)
      end
    end
  end
  local ceiling = math.max(used, math.min(used + wanted, free))
  if ceiling > 0 then
    redis.call('HSET', key, member, text(used) .. ' ' .. text(ceiling) .. ' ' .. text(now_ms))
    redis.call('PEXPIRE', key, {_KEPT_MS})
  else
    redis.call('HDEL', key, member)
  end
  answer[#answer + 1] = ceiling
  answer[#answer + 1] = others_used
  answer[#answer + 1] = free - ceiling
end
return answer
"""


@dataclass(slots=True, eq=False)
class QuotaBook:
    """The book as one process sees it. `member`: its name, which no other process has."""

    connection: RedisConnection
    keys: Keys
    member: str

    async def exchange(self, reports: Sequence[CeilingReport]) -> Grants:
        """Record these reports. Raises `redis.RedisError`."""
        keys = [self.keys.quota_members, *(self.keys.quota(report.meter) for report in reports)]
        numbers = [number for one in reports for number in (one.limit, one.used, one.wanted)]
        members, *flat = await self.connection.script(EXCHANGE_SHARES, keys, [self.member, *numbers])
        return Grants([Grant(*pair) for pair in zip(flat[::3], flat[1::3], flat[2::3], strict=True)], members)

    async def leave(self) -> None:
        """Be no member any more: what it may use is free, what it has used expires. Raises `redis.RedisError`."""
        await self.connection.client.hdel(self.keys.quota_members, self.member)
