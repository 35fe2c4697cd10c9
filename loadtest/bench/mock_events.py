"""Publishes the KV events of the C mocks, in vLLM's format, at the rate of their requests.

    python -m loadtest.bench.mock_events --bodies LOAD.bin PORT PORT ...   # prints the sockets, runs until SIGTERM

The mocks keep no blocks; this process keeps them in their place. At the start every pod stores the conversations that
the bodies share. Then, for each request that a mock has answered, its pod stores the blocks of a new turn (message and
answer) and, once it holds many, removes those of an old one. The mocks' counts are read every 25 ms, about a step of an
engine: one message has the events of the requests of one step. The tokens of a new turn are random, because no later
request shares them: predictions for its blocks are not confirmed, they expire.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench.bodies import PREFIXES, TAIL_TOKENS
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.mock_engine.event_publisher import KvPublisher
from loadtest.mock_engine.faults import FaultBoard
from loadtest.mock_engine.mock_config import KvEventConfig
from router.prompt.template import ChatTemplate
from router.types import BlocksRemoved, BlocksStored, KvEvent

BLOCK_TOKENS = 16
STEP_S = 0.025
ANSWER_TOKENS = 128
"""As the mocks report them."""
TURN_BLOCKS = (TAIL_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS
MAX_TURNS = 1000
"""New turns that a pod holds."""
VOCABULARY = 100_000


def unpack_bodies(packed: bytes) -> Iterator[bytes]:
    """The bodies of a file of the generator."""
    at = 0
    while at < len(packed):
        (length,) = struct.unpack_from("<I", packed, at)
        yield packed[at + 4 : at + 4 + length]
        at += 4 + length


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Their common prefix, in whole blocks."""
    differs = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    shared = next(differs, min(len(one), len(other)))
    return one[: shared - shared % BLOCK_TOKENS]


def conversations(bodies: Sequence[bytes], salt: str) -> list[BlocksStored]:
    """The prefix of each conversation as one event. `bodies`: those of `warm_chats`, where a conversation returns after
    `PREFIXES` bodies."""
    tokenizer = mock_tokenizer()
    template = ChatTemplate(tokenizer)

    def tokens(body: bytes) -> array[int]:
        return tokenizer.encode(template.render(json.loads(body)), add_special_tokens=False)

    found, names = [], itertools.count(1)
    for number in range(PREFIXES):
        shared = shared_tokens(tokens(bodies[number]), tokens(bodies[number + PREFIXES]))
        hashes = tuple(itertools.islice(names, len(shared) // BLOCK_TOKENS))
        found.append(BlocksStored(block_hashes=hashes, tokens=tuple(shared), block_size_tokens=BLOCK_TOKENS, salt=salt))
    return found


@dataclass(slots=True)
class PodBlocks:
    """The blocks of one mock, which holds all conversations."""

    held: Sequence[BlocksStored]
    random: Random
    answered: int = 0
    _turns: deque[tuple[int, ...]] = field(default_factory=deque)
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(10**9))

    def step(self, answered: int) -> list[KvEvent]:
        """The events since the last step; `answered` counts all requests so far."""
        new, self.answered = answered - self.answered, answered
        return [event for _ in range(new) for event in self._turn()]

    def _turn(self) -> Iterator[KvEvent]:
        names = tuple(itertools.islice(self._names, TURN_BLOCKS))
        parent = self.random.choice(self.held).block_hashes[-1]
        tokens = tuple(self.random.choices(range(VOCABULARY), k=len(names) * BLOCK_TOKENS))
        yield BlocksStored(block_hashes=names, parent_hash=parent, tokens=tokens, block_size_tokens=BLOCK_TOKENS)
        self._turns.append(names)
        if len(self._turns) > MAX_TURNS:
            yield BlocksRemoved(block_hashes=self._turns.popleft())


async def publish(ports: Sequence[int], held: Sequence[BlocksStored]) -> None:
    """Publish until cancelled."""
    publishers = [KvPublisher(KvEventConfig(), "127.0.0.1", FaultBoard()) for _ in ports]
    pods = {port: PodBlocks(held, Random(port)) for port in ports}
    print(
        json.dumps([{key: one.source[key] for key in ("endpoint", "replay_endpoint")} for one in publishers]),
        flush=True,
    )
    for publisher in publishers:
        publisher.publish(held)
    async with httpx.AsyncClient(trust_env=False) as client:

        async def counts() -> dict[int, int]:
            answer = await client.get(f"http://127.0.0.1:{ports[0]}/_stats")
            return {mock["port"]: mock["req"] for mock in answer.json()["ports"]}

        for port, answered in (await counts()).items():
            pods[port].answered = answered
        while True:
            await asyncio.sleep(STEP_S)
            for port, answered in (await counts()).items():
                if events := pods[port].step(answered):
                    publishers[ports.index(port)].publish(events)


def main(
    ports: Annotated[list[int], typer.Argument(help="Ports of the mocks, all of one process.")],
    bodies: Annotated[Path, typer.Option(exists=True, help="Bodies that the generator sends.")],
    salt: Annotated[str, typer.Option(help="Cache salt of the requests.")] = "",
) -> None:
    """Publish KV events until SIGTERM."""
    asyncio.run(publish(ports, conversations(list(unpack_bodies(bodies.read_bytes())), salt)))


if __name__ == "__main__":
    typer.run(main)
