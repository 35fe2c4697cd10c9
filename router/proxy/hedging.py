"""What if the first pod does not begin to answer?

Where a policy says after how long, the next candidate is asked as well. Whoever has the first piece of an answer gets
through to the client; the other attempt is called off, and closing its connection stops its engine. Both are attempts
like any other: each books, learns and fails for itself. What one of them computes is in vain, so that no shipped policy
does this, and the retry budget bounds it. What may be done only once, a handoff or a pull, is never hedged. This file
never ranks candidates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from router.decision import Candidate, Direct
from router.errors import UpstreamError
from router.proxy.downstream import Downstream
from router.proxy.headers import HeaderList
from router.proxy.request_context import RequestContext
from router.proxy.retries import Retries

Attempt: TypeAlias = Callable[[RequestContext, Candidate, Downstream], Awaitable[None]]
Next: TypeAlias = Callable[[RequestContext], Candidate | None]
Blame: TypeAlias = Callable[[RequestContext, Candidate, UpstreamError], None]


class Hedges:
    """Makes one or two attempts at a request. `following` is the candidate behind the last that was tried."""

    def __init__(self, attempt: Attempt, following: Next, blame: Blame, retries: Retries) -> None:
        self._attempt = attempt
        self._following = following
        self._record_failure = blame
        self._retries = retries

    async def attempt(self, context: RequestContext, candidate: Candidate, client: Downstream, after_s: float) -> None:
        """With the next candidate beside it, if nothing has come after `after_s`. Raises what an attempt raises, where
        all have failed."""
        race = _Race(context, client, self._attempt)
        try:
            race.enter(candidate)
            if await race.undecided(after_s) and (second := self._second(context, candidate)) is not None:
                race.enter(second)
            failures = await race.failures()
        finally:
            await race.end()
        for failed, error in failures[:-1]:
            if isinstance(error, UpstreamError):
                self._record_failure(context, failed, error)
        if failures:
            raise failures[-1][1]

    def _second(self, context: RequestContext, first: Candidate) -> Candidate | None:
        """Who may be asked beside the first."""
        if not _repeatable(first):
            return None
        second = self._following(context)
        if second is None or not _repeatable(second) or second.pod.id == first.pod.id or not self._retries.hedged():
            return None
        context.tries += 1
        return second


class _Race:
    """Attempts at one request, side by side."""

    def __init__(self, context: RequestContext, client: Downstream, attempt: Attempt) -> None:
        self._story = context
        self._client = client
        self._attempt = attempt
        self._running: dict[asyncio.Task[None], Candidate] = {}

    def enter(self, candidate: Candidate) -> None:
        """One more attempt begins."""
        way = _Way(self._client, lambda status: self._first_is(candidate, status))
        made = asyncio.ensure_future(self._attempt(self._story, candidate, way))
        self._running[made] = candidate

    async def undecided(self, after_s: float) -> bool:
        """After so long, is there neither an answer nor a failure?"""
        done, _ = await asyncio.wait(self._running, timeout=after_s)
        return not done and not self._client.started

    async def failures(self) -> list[tuple[Candidate, BaseException]]:
        """Why each of them failed, once all have ended; nothing where one has answered."""
        results = await asyncio.gather(*self._running, return_exceptions=True)
        if None in results:
            return []
        ended = zip(self._running.values(), results, strict=True)
        return [(who, error) for who, error in ended if error and not isinstance(error, asyncio.CancelledError)]

    async def end(self) -> None:
        """Call off whatever goes on."""
        for attempt in self._running:
            attempt.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _first_is(self, candidate: Candidate, status: int) -> None:
        """This one answers: the context goes on as if there were no other."""
        self._story.candidate, self._story.status = candidate, status
        for attempt, other in self._running.items():
            if other is not candidate:
                attempt.cancel()


class _Way:
    """One attempt's way to the client."""

    def __init__(self, client: Downstream, starts: Callable[[int], None]) -> None:
        self._client = client
        self._starts = starts
        self.put, self.ready, self.finish = client.put, client.ready, client.finish

    @property
    def started(self) -> bool:
        return self._client.started

    @property
    def disconnected(self) -> bool:
        return self._client.disconnected

    def start(self, status: int, headers: HeaderList) -> None:
        """Nobody else gets through from now on."""
        self._starts(status)
        self._client.start(status, headers)


def _repeatable(candidate: Candidate) -> bool:
    return isinstance(candidate.plan, Direct) and candidate.plan.pull is None
