"""All that is read from Redis is bounded: a reader without a bound fails here."""

from __future__ import annotations

import re
from pathlib import Path

ROUTER = Path(__file__).parents[2] / "router"
UNBOUNDED = re.compile(
    r"""(?:client|_redis|pipeline)\.(?:get|mget|hget|hgetall|hmget|hkeys|hvals|hscan|smembers|sscan|sinter|zrange\w*"""
    r"""|zrevrange\w*|zscan|lrange|xread|xrange|xrevrange|xinfo\w*|scan\w*|keys|dump|getdel|getex)\("""
)
"""Commands whose answers are as long as a writer wants. Scripts in `stores` read in their place, or GETRANGE."""


def test_no_command_reads_without_a_bound() -> None:
    found = [
        f"{path.relative_to(ROUTER)}:{number}"
        for path in sorted(ROUTER.rglob("*.py"))
        if "RedisConnection" in path.read_text("utf-8")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if UNBOUNDED.search(line)
    ]
    assert found == []


def test_the_readers_of_the_release_before_would_be_found() -> None:
    """Their lines, so that the test above can fail."""
    for line in (
        "await self._redis.zrangebyscore(self._keys.scopes, oldest)",
        "await self._redis.hgetall(key)",
        "await self._client.get(self._key)",
        "await self._redis.xread({key: after})",
    ):
        assert UNBOUNDED.search(line)
