"""Asks pods for the tokens that they put in place of pictures, for models whose formula is not known here.

A pod is asked for a prompt with the picture alone, after requests with it, and one at a time. What is learnt is used
only with pods that have passed the self-test with pictures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from router.engines.adapter import TOKENIZE_PATH, parse_tokens
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamBroken, UpstreamError
from router.feeds.watch import Post
from router.fleet.fleet import Fleet
from router.prompt.pictures.learnt import Wanted
from router.prompt.pictures.picture_reader import PictureReader
from router.types import Endpoint, Pod, PodState, PrefixTrust, PromptPrefix

INTERVAL_S = 1.0
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024
"""A longer answer is not read. This one has about 40,000 tokens, which are read in 2 ms."""
WantedPictures: TypeAlias = Callable[[], Iterator[tuple[PictureReader, Wanted]]]
ReadProbe: TypeAlias = Callable[[Endpoint, dict[str, Any]], Awaitable[PromptPrefix | None]]


@dataclass(slots=True, eq=False)
class PictureLearner:
    """Learns wanted pictures. `read` returns the router's tokens of a prompt, with one for a picture."""

    fleet: Fleet
    post: Post
    read: ReadProbe
    wanted: WantedPictures
    interval_s: float = INTERVAL_S

    async def run(self) -> None:
        while True:
            for reader, wanted in list(self.wanted()):
                await self._learn(reader, wanted)
            await asyncio.sleep(self.interval_s)

    async def _learn(self, reader: PictureReader, wanted: Wanted) -> None:
        pod = self._pod(wanted.weights)
        if pod is None or reader.learnt is None:
            return
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{wanted.base64}"}}
        chat = {"model": pod.models[0], "messages": [{"role": "user", "content": [shown]}]}
        ours = await self.read(Endpoint.CHAT, chat)
        try:
            engine = await self._tokens(pod, chat) if ours is not None else None
        except UpstreamError as error:
            if not _is_refusal(error):
                return  # wanted again by the next request with it
            engine = None
        reader.learnt.learn(wanted, ours.tokens if ours is not None else (), engine, reader.placeholder)

    def _pod(self, weights: str) -> Pod | None:
        """A pod that identifies pictures as the one that was asked about."""
        for status in self.fleet.snapshot.pods:
            pod, is_trusted = status.pod, status.pod.trust is PrefixTrust.TRUSTED
            if status.state is PodState.READY and is_trusted and pod.weights == weights and pod.models:
                return pod
        return None

    async def _tokens(self, pod: Pod, chat: dict[str, Any]) -> list[int] | None:
        """The engine's tokens of a chat; None if it has no /tokenize. Raises `UpstreamError`."""
        body = ENGINES[pod.engine].tokenize_body(chat["model"], {"messages": chat["messages"]})
        if body is None:
            return None
        answer = await self.post(pod, TOKENIZE_PATH, body, TIMEOUT_S)
        found = parse_tokens(answer) if len(answer) <= MAX_ANSWER_BYTES else None
        return found.tolist() if found is not None else None


def _is_refusal(error: UpstreamError) -> bool:
    """Whether the engine refused the picture, or takes none; it would do so again."""
    return isinstance(error, UpstreamBroken) and 400 <= error.status < 500 and error.status != 429
