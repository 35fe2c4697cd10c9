"""Retries calls to Redis with a growing, jittered backoff."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from router.feeds.supervise import raise_if_cancelled
from router.fleet.retry_pause import retry_pause_s
from router.stores.redis_connection import redis_error_text

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.5

log = structlog.get_logger()


class Backoff:
    """The state of one retry loop. `what` names the calls in the log, and `nodes` the addresses of Redis; `failures`
    counts those since the last success, and `error` is the last of them.
    The log gets one line when Redis becomes unavailable and one when it is available again."""

    def __init__(self, what: str, nodes: str = "") -> None:
        self._what = what
        self._nodes = nodes
        self.failures, self.error = 0, ""

    async def attempt(self, call: Callable[[], Awaitable[None]]) -> bool:
        """Await `call`. After a failure waits for the backoff and returns False."""
        try:
            await call()
        except (RedisError, OSError) as error:
            raise_if_cancelled()
            self.error = redis_error_text(error)
            if not self.failures:
                log.warning(
                    "Redis unavailable",
                    call=self._what,
                    redis=self._nodes,
                    error=self.error,
                    hint="check that it runs, and index.redis; this process continues and tries again",
                )
            self.failures += 1
            wait_s = retry_pause_s(self.failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
            await asyncio.sleep(random.uniform(0.5, 1) * wait_s)
            return False
        raise_if_cancelled()
        if self.failures:
            log.info("Redis available again", call=self._what, failures=self.failures)
        self.failures, self.error = 0, ""
        return True
