"""Does what `request/` asks for while a request is prepared: for any front on asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from router.frontends.body_edits import UuidRemoval
from router.frontends.prompt_readers import PromptReader
from router.frontends.queue_tasks import QueueTasks
from router.frontends.response_locator import ResponseLocator
from router.request.preparation_steps import Locate, QuotaExchange, Step, Ticket, Tokens

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutor:
    """Does what a request needs before it can be sent. `next_exchange` waits until shares of quotas have been exchanged
    with other processes."""

    readers: Mapping[str, PromptReader]
    responses: ResponseLocator
    next_exchange: Callable[[], Awaitable[None]] | None = None
    queues: QueueTasks | None = None
    uuids: UuidRemoval

    async def run(self, steps: Generator[Step, Any, _Result]) -> _Result:
        """The result of `steps`. Raises what they raise."""
        resume: Callable[[Any], Step] = steps.send
        answer: Any = None
        step: Step | None = None
        try:
            while True:
                try:
                    step = resume(answer)
                except StopIteration as end:
                    result: _Result = end.value
                    return result
                try:
                    resume, answer = steps.send, await self._answer(step)
                except BaseException as error:
                    resume, answer = steps.throw, error
        finally:  # an error refers to this frame: a cycle that would keep the body in memory
            del resume, answer, step, steps

    def _answer(self, step: Step) -> Awaitable[Any]:
        if isinstance(step, Tokens):
            reader = self.readers.get(step.request.model)
            return reader.read(step.request) if reader is not None else _nothing()
        if isinstance(step, Ticket):
            assert self.queues is not None
            return self.queues.wait(step)
        if isinstance(step, Locate):
            return self.responses.locate(step.response_id, step.param, step.owner)
        if isinstance(step, QuotaExchange):
            assert self.next_exchange is not None
            return self.next_exchange()
        return self.uuids.removed(step.body)


async def _nothing() -> None:
    """No tokens: the model has no reader."""
