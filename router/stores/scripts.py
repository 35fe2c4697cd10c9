"""The Lua scripts that run in Redis.

Each script is atomic. It uses the keys of one holder and its scope, or the key of the routers. Scripts check epoch and
sequence number and refuse late or repeated writes. They use the server's clock only. All keys are passed as KEYS and
share one hash tag.
"""

from __future__ import annotations

from typing import Final

from router.admission.sharing import ROW_TTL_S, SILENT_S
from router.hashing import HASH_BYTES

LOG_ENTRIES: Final = 65_536
LOG_MS: Final = 60_000
"""Maximum length and age of the log. A reader that falls further behind reads the holders again."""

NOW: Final = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

_APPEND = f"""
local function append(log, ...)
  redis.call('XADD', log, 'MINID', '~', string.format('%.0f', now_ms - {LOG_MS}), '*', ...)
  redis.call('XTRIM', log, 'MAXLEN', '~', {LOG_ENTRIES})
  redis.call('PEXPIRE', log, {60 * LOG_MS})
end
"""


def _writing(lua: str) -> str:
    """A script with the server's clock, and with `append` for the log."""
    return NOW + _APPEND + lua


BEGIN: Final = _writing("""
-- KEYS row holders log [old blocks...]; ARGV id owner takeover ttl_ms kind facts complete
local row = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if row[1] and row[1] ~= ARGV[2] and ARGV[3] == '0' then return {'held', '0'} end
local epoch = clock[1] * 1000000 + clock[2]
if row[2] and epoch <= tonumber(row[2]) then epoch = tonumber(row[2]) + 1 end
epoch = string.format('%.0f', epoch)
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'epoch', epoch, 'seq', '0', 'complete', ARGV[7], 'n0', '0', 'n1', '0',
           'n2', '0', 'n3', '0', 'beat', string.format('%.0f', now_ms), 'facts', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
for i = 4, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('ZADD', KEYS[2], string.format('%.0f', now_ms), ARGV[1])
append(KEYS[3], 'k', ARGV[5], 'h', ARGV[1], 'e', epoch, 's', '0', 'f', ARGV[6], 'c', ARGV[7])
return {'ok', epoch}
""")
"""Start an epoch of a holder. kind: `empty`, or `reload` if its blocks follow, up to a `seal`."""

APPLY: Final = _writing("""
-- KEYS row log blocks...; ARGV id epoch seq kind complete ttl_ms, then for each of KEYS[3..]: place + - count
local row = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not row[1] then return 'lost' end
if row[1] ~= ARGV[2] then return 'fenced' end
local seq, given = tonumber(row[2]), tonumber(ARGV[3])
if given <= seq then return 'ok' end
if given > seq + 1 then return 'gap' end
local function each(command, key, blob)
  for from = 1, #blob, 32768 do
    local members = {}
    for at = from, math.min(from + 32767, #blob), 8 do members[#members + 1] = string.sub(blob, at, at + 7) end
    redis.call(command, key, unpack(members))
  end
end
local entry = {'k', ARGV[4], 'h', ARGV[1], 'e', ARGV[2], 's', ARGV[3], 'c', ARGV[5]}
local counts, result = {}, 'ok'
for i = 3, #KEYS do
  local at = 7 + (i - 3) * 4
  local tier, added, removed, count = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if #added > 0 then
    each('SADD', KEYS[i], added)
    entry[#entry + 1] = '+' .. tier
    entry[#entry + 1] = added
  end
  if #removed > 0 then
    each('SREM', KEYS[i], removed)
    entry[#entry + 1] = '-' .. tier
    entry[#entry + 1] = removed
  end
  redis.call('PEXPIRE', KEYS[i], ARGV[6])
  if redis.call('SCARD', KEYS[i]) ~= tonumber(count) then result = 'diverged' end
  counts[#counts + 1] = 'n' .. tier
  counts[#counts + 1] = count
end
redis.call('HSET', KEYS[1], 'seq', ARGV[3], 'complete', ARGV[5], unpack(counts))
append(KEYS[2], unpack(entry))
return result
""")
"""Write the next changes of a holder, or the seal of its reload. Idempotent."""

BEAT: Final = _writing("""
-- KEYS row holders log blocks (of all places); ARGV id epoch complete ttl_ms count (of all places)
local row = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not row[1] then return 'lost' end
if row[1] ~= ARGV[2] then return 'fenced' end
local now = string.format('%.0f', now_ms)
redis.call('HSET', KEYS[1], 'beat', now, 'complete', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now_ms - 2 * ARGV[4]))
append(KEYS[3], 'k', 'beat', 'h', ARGV[1], 'e', ARGV[2], 's', row[2], 'c', ARGV[3])
for i = 4, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
  if redis.call('SCARD', KEYS[i]) ~= tonumber(ARGV[i + 1]) then return 'diverged' end
end
return 'ok'
""")
"""Extend a holder's TTL and compare its block counts with those of its publisher."""

RETIRE: Final = _writing("""
-- KEYS row holders log blocks...; ARGV id epoch
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 'fenced' end
redis.call('UNLINK', KEYS[1], unpack(KEYS, 4))
redis.call('ZREM', KEYS[2], ARGV[1])
append(KEYS[3], 'k', 'gone', 'h', ARGV[1], 'e', ARGV[2], 's', '0')
return 'ok'
""")
"""Remove a holder."""

MEMBERS: Final = """
-- KEYS sorted set; ARGV lowest score, max members, max bytes of one
local newest, kept = redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', ARGV[1], 'LIMIT', 0, ARGV[2]), {}
for _, member in ipairs(newest) do
  if #member <= tonumber(ARGV[3]) then kept[#kept + 1] = member end
end
return {kept, redis.call('ZCOUNT', KEYS[1], ARGV[1], '+inf') - #kept}
"""
"""Members by score, the highest first, and the number of those that are left out."""

FIELDS: Final = """
-- KEYS hash; ARGV max bytes of a value, fields...
for i = 2, #ARGV do
  local size = redis.call('HSTRLEN', KEYS[1], ARGV[i])
  if size > tonumber(ARGV[1]) then return size end
end
return redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
"""
"""Values of a hash, or the size of one that is too large."""

BLOCKS: Final = f"""
-- KEYS set; ARGV cursor, count
local page, seen, packed = redis.call('SSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2]), {{}}, {{}}
for _, member in ipairs(page[2]) do
  if #member == {HASH_BYTES} and not seen[member] then
    seen[member], packed[#packed + 1] = true, member
  end
end
return {{page[1], table.concat(packed)}}
"""
"""The next cursor and some blocks, each once."""

ENTRIES: Final = """
-- KEYS log; ARGV after, max entries, max bytes of one, bytes after which to stop
local found, after, left = {}, ARGV[1], tonumber(ARGV[4])
for _ = 1, tonumber(ARGV[2]) do
  local entry = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 1)[1]
  if not entry then break end
  local size = 0
  for _, text in ipairs(entry[2]) do size = size + 16 + #text end
  found[#found + 1], after, left = entry, entry[1], left - size
  if size > tonumber(ARGV[3]) then entry[2], left = size, -1 end
  if left < 0 then break end
end
return found
"""
"""The next entries of a log. One that is too large comes without its content, and as the last."""

LAST_ENTRY: Final = """
-- KEYS log
return (redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1] or {'0-0'})[1]
"""

MAX_ROWS: Final = 1024
"""A hash of routers or processes with more rows is deleted: they write theirs again."""

EXCHANGE: Final = (
    NOW
    + f"""
if redis.call('HLEN', KEYS[1]) > {MAX_ROWS} then redis.call('UNLINK', KEYS[1]) end
"""
    + """
-- KEYS routers; ARGV own id, own row or '', ttl_ms, max bytes of a row, max bytes of all
local ttl_ms, left = tonumber(ARGV[3]), tonumber(ARGV[5])
if #ARGV[2] > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now_ms) .. ARGV[2])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], 60 * ttl_ms)
local alive = {}
for _, router in ipairs(redis.call('HKEYS', KEYS[1])) do
  local size = #router + redis.call('HSTRLEN', KEYS[1], router)
  local fits = size <= tonumber(ARGV[4])
  local written_ms, row = string.match(fits and redis.call('HGET', KEYS[1], router) or '', '^(%d+) (.*)$')
  local age_ms = written_ms and math.abs(now_ms - written_ms) or math.huge
  if age_ms > 60 * ttl_ms then redis.call('HDEL', KEYS[1], router) end
  if not fits or (age_ms <= ttl_ms and router ~= ARGV[1]) then
    if fits then left = left - size end
    alive[#alive + 1] = string.sub(router, 1, 256)
    alive[#alive + 1] = fits and left >= 0 and row or false
  end
end
return alive
"""
)
"""Write or remove this router's row, and read those of the others. One that is too large is nil, and removed."""

SWAP: Final = """
-- KEYS string; ARGV what was read ('' for none), new value, max bytes that are read, ttl_ms (0 for none)
if redis.call('GETRANGE', KEYS[1], 0, ARGV[3]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[4] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 1
"""
"""Replace a string, unless somebody else has done so meanwhile."""

_KEPT_MS = 120_000
"""Keys of quotas that nobody uses expire after this time."""

EXCHANGE_SHARES: Final = f"""{NOW}
-- KEYS members meter...; ARGV member, then for each meter: limit used wanted kept_ms
local ttl_ms, silent_ms, alive = {int(ROW_TTL_S * 1000)}, {int(SILENT_S * 1000)}, {{}}
local function text(number) return string.format('%.0f', number) end
local member, answer = ARGV[1], {{0}}
for _, key in ipairs(KEYS) do
  if redis.call('HLEN', key) > {MAX_ROWS} then redis.call('UNLINK', key) end
end
local function number(digits) return math.min(tonumber(digits), 1e15) end
local function is_gone(row_ms, kept_ms) return not row_ms or math.abs(now_ms - number(row_ms)) > kept_ms end
redis.call('HSET', KEYS[1], member, text(now_ms))
redis.call('PEXPIRE', KEYS[1], {_KEPT_MS})
local members = redis.call('HGETALL', KEYS[1])
for i = 1, #members, 2 do
  if is_gone(string.match(members[i + 1], '^%d+$'), ttl_ms) then
    redis.call('HDEL', KEYS[1], members[i])
  else
    answer[1] = answer[1] + 1
    alive[members[i]] = tonumber(members[i + 1]) + silent_ms >= now_ms
  end
end
for meter = 2, #KEYS do
  local at = 4 * meter - 6
  local limit, used, wanted = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local kept_ms = tonumber(ARGV[at + 3])
  local free, others_used, key = limit, 0, KEYS[meter]
  local rows = redis.call('HGETALL', key)
  for i = 1, #rows, 2 do
    if rows[i] ~= member then
      local row_used, row_ceiling, row_ms = string.match(rows[i + 1], '^(%d+) (%d+) (%d+)$')
      if is_gone(row_ms, kept_ms) then
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
    redis.call('PEXPIRE', key, math.max(kept_ms, {_KEPT_MS}))
  else
    redis.call('HDEL', key, member)
  end
  answer[#answer + 1] = ceiling
  answer[#answer + 1] = others_used
  answer[#answer + 1] = free - ceiling
end
return answer
"""
"""Record what a process has used of its limits, and divide what no process may use: `admission/sharing.py`."""
