"""How is a Redis asked that may not answer?

Again, later each time, and never by all replicas at once. Says once that it does not answer, and once that it does
again. This file knows no question.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from router.cancellation import mind_cancellation

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.5

log = structlog.get_logger()


class Patience:
    """`failures` counts since the last answer."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.failures = 0

    async def ask(self, question: Callable[[], Awaitable[None]]) -> bool:
        """False if there was no answer; it has been waited then, and the next question is due."""
        try:
            await question()
        except (RedisError, OSError) as error:
            mind_cancellation()
            if not self.failures:
                log.warning("Redis does not answer", asked=self._what, why=repr(error))
            self.failures += 1
            await asyncio.sleep(random.uniform(0.5, 1) * min(FIRST_BACKOFF_S * 2**self.failures, LONGEST_BACKOFF_S))
            return False
        mind_cancellation()
        if self.failures:
            log.info("Redis answers again", asked=self._what)
        self.failures = 0
        return True
