"""Which policies are in force, and when do others take their place?

Looks at the policy files twice a second (also through the links of a mounted ConfigMap), and at once on SIGHUP
or an admin call. The whole set is built and checked before it is swapped in; while anything is wrong with it, the last
good one decides, and log, metric and /readyz name file and line. What was learnt about pods, prefixes and load lives
elsewhere and survives. This file never decides a request.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from router.config.policies import PolicyFolder
from router.errors import ConfigError
from router.observe.metrics import Metrics
from router.policy.policy_set import PolicySet

INTERVAL_S, STEADY_S = 0.5, 0.2
"""Between two looks; and a change is taken up once it has stood for so long: an editor may still be writing."""

Review = Callable[[PolicySet, PolicySet], Awaitable[str | None]]
"""What would change between an old set and a new one, in a sentence; None for nothing to say."""


async def no_review(_old: PolicySet, _new: PolicySet) -> str | None:
    """Nobody looks."""
    return None


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reload:
    """What came of reading the files anew."""

    version: str
    """Of the set that is in force now."""
    changed: bool = False
    review: str | None = None
    error: str = ""
    """With file and line; the set in force is then the last good one."""


class PolicyFeed:
    """Owns the set in force. Raises `ConfigError` at birth: a router does not start on wrong policies."""

    def __init__(
        self,
        folder: PolicyFolder,
        metrics: Metrics,
        review: Review = no_review,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._folder = folder
        self._metrics = metrics
        self._review = review
        self._sleep = sleep
        self._stamp = self._stamped()
        self._one_at_a_time = asyncio.Lock()
        self.error = ""
        """Why the files that stand there are not in force."""
        self._take(folder.read())

    def current(self) -> PolicySet:
        """The set in force."""
        return self._policies

    async def run(self) -> None:
        """Until cancelled."""
        hung_up = asyncio.Event()
        with _on_hangup(hung_up.set):
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await hung_up.wait()
                if hung_up.is_set():
                    hung_up.clear()
                    await self.reload()
                else:
                    await self.look()

    async def look(self) -> None:
        """Take up what has changed, once it stands still."""
        seen = await asyncio.to_thread(self._stamped)
        if seen != self._stamp:
            await self._sleep(STEADY_S)
            if await asyncio.to_thread(self._stamped) == seen:
                await self.reload()

    async def reload(self) -> Reload:
        """Read everything anew, whether or not it has changed. Never raises for what stands in the files."""
        async with self._one_at_a_time:
            self._stamp = await asyncio.to_thread(self._stamped)
            try:
                new = await asyncio.to_thread(self._folder.read)
            except ConfigError as error:
                return self._refuse(str(error))
            except Exception as error:  # a mistake of ours must not pass for good files
                log.exception("policies could not be read")
                return self._refuse(repr(error))
            old, changed = self._policies, new.version != self._policies.version
            self._take(new)
            self._metrics.policy_reloads.labels("ok").inc()
            review = await self._reviewed(old, new) if changed else None
            log.info("policies reloaded", version=new.version, changed=changed, review=review)
            return Reload(new.version, changed, review)

    async def _reviewed(self, old: PolicySet, new: PolicySet) -> str | None:
        """What the new ones change is found out while they decide already: nobody waits for it."""
        try:
            return await self._review(old, new)
        except Exception:
            log.exception("what the new policies change could not be found out")
            return None

    def _take(self, policies: PolicySet) -> None:
        self._policies, self.error = policies, ""
        self._metrics.policy_reload_failed.set(0)
        self._metrics.observe_policies(policies.version, {one.name: one.version for one in policies.active})

    def _refuse(self, error: str) -> Reload:
        self.error = error
        self._metrics.policy_reload_failed.set(1)
        self._metrics.policy_reloads.labels("refused").inc()
        log.error("policies not reloaded; the last good ones stay", version=self._policies.version, error=error)
        return Reload(self._policies.version, error=error)

    def _stamped(self) -> object:
        """None while a file vanishes under our eyes, which is a change."""
        try:
            return self._folder.stamp()
        except OSError:
            return None


@contextmanager
def _on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """While inside, SIGHUP calls. Only a main thread hears signals; elsewhere nothing does."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGHUP, call)
    except (ValueError, RuntimeError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
