"""Do conversations stay with their version of a canary, and what does it cost the caches, over HTTP?

    python -m loadtest.fleets.canary

A name with two models (95 and 5 of 100), each with mock engines of its own. Half of the conversations are agents with a
session header, half are chats without. While they go on, the weights become 90 and 10. Then the same conversations ask
for the model that they had, on cleared caches: that is what separate fleets would have cached.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import (
    FleetPlan,
    cancel_on_sigterm,
    clear_caches,
    configured_router,
    mock_fleet,
    priced_config,
    temporary_folder,
)
from loadtest.mock_engine.vocabulary import WORDS

NAME, OLD, NEW = "chat", "chat-1", "chat-2"
READ_S = 2.0
"""After which a changed file of names is in use."""
SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 150, 60, 4
TURNS = {"agent": 4, "chat": 3}


@dataclass(slots=True)
class Conversation:
    number: int
    kind: str
    models: list[str] = field(default_factory=list)
    """Who answered each turn."""
    failed: int = 0
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_tokens: Counter[str] = field(default_factory=Counter)
    began_s: float = 0.0
    ended_s: float = 0.0

    def texts(self, turn: int) -> list[dict[str, str]]:
        """The messages of a turn; answers are not sent again, so that both runs have the same prompts."""
        system = " ".join(Random(f"system {self.number % 8}").choices(WORDS, k=SYSTEM_WORDS))
        messages = [{"role": "system", "content": system}]
        for number in range(turn + 1):
            text = " ".join(Random(f"{self.number} {number}").choices(WORDS, k=TURN_WORDS))
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
        return messages[:-1]


async def converse(client: httpx.AsyncClient, one: Conversation, model: str) -> None:
    headers = {"x-session-id": f"session-{one.number}"} if one.kind == "agent" else {}
    one.began_s = time.monotonic()
    for turn in range(TURNS[one.kind]):
        body = {"model": model, "messages": one.texts(turn), "max_tokens": ANSWER_TOKENS}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            one.failed += 1
            continue
        found = answer.json()
        used, by = found["usage"], answer.headers.get("x-warmroute-model", found["model"])
        one.models.append(by)
        one.prompt_tokens[by] += used["prompt_tokens"]
        one.cached_tokens[by] += (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    one.ended_s = time.monotonic()


async def run(url: str, conversations: Sequence[tuple[Conversation, str]], clients: int) -> None:
    """All conversations (each with the model that it asks for), `clients` of them at a time, in their order."""
    waiting = iter(conversations)
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:

        async def one_after_the_other() -> None:
            for one, model in waiting:
                await converse(client, one, model)

        await asyncio.gather(*(one_after_the_other() for _ in range(clients)))


def names_text(old: int, new: int) -> str:
    return f"names: [{{name: {NAME}, to: {{{OLD}: {old}, {NEW}: {new}}}}}]\n"


def config_of(plan: FleetPlan, pods: Sequence[str], names: Path) -> dict[str, Any]:
    config = priced_config(pods, plan)
    models = [{**config["models"][0], "name": name} for name in (OLD, NEW)]
    return config | {"models": models, "names": str(names), "log": {"requests": False}}


def share_of_new(found: Sequence[Conversation]) -> float:
    return sum(one.models[0] == NEW for one in found) / max(len(found), 1)


def cached_shares(found: Sequence[Conversation]) -> dict[str, float]:
    prompt, cached = (sum((getattr(one, name) for one in found), Counter[str]()) for name in _COUNTS)
    return {model: cached[model] / max(prompt[model], 1) for model in (OLD, NEW)}


_COUNTS = ("prompt_tokens", "cached_tokens")


def report(
    before: Sequence[Conversation], later: Sequence[Conversation], again: Sequence[Conversation], at_s: float
) -> str:
    """`before`: began with 95 to 5; `later`: after that; `again`: `before` by model. `at_s`: of the change."""
    after = [one for one in later if one.began_s > at_s + READ_S]
    whole = [one for one in before if one.ended_s < at_s] + after
    changed = sum(len(set(one.models)) > 1 for one in whole)
    across = Counter(len(set(one.models)) > 1 for one in before if one.ended_s >= at_s)
    cached, alone = cached_shares(before), cached_shares(again)
    failed = sum(one.failed for one in (*before, *later, *again))
    lines = [
        f"conversations: {len(before)} at 95 to 5, {len(after)} at 90 to 10; requests that failed: {failed}",
        f"share of the new version: {share_of_new(before):.2%}, then {share_of_new(after):.2%}",
        f"conversations that changed version without a change of weights: {changed} of {len(whole)}",
        f"of those that went on while the weights changed: {across[True]} moved, {across[False]} stayed",
        *(f"cached share of {one}: {cached[one]:.1%}; as a fleet of its own {alone[one]:.1%}" for one in cached),
    ]
    return "\n".join(lines)


async def measure(conversations: int, later: int, clients: int, pods: int) -> str:
    cancel_on_sigterm()
    kinds = list(TURNS)
    many = [Conversation(number, kinds[number % len(kinds)]) for number in range(conversations + later)]
    first, others, changed_s = many[:conversations], many[conversations:], 0.0
    old = FleetPlan(pods=pods, num_blocks=16_384, model=OLD, time_scale=0.02)
    new = FleetPlan(pods=1, num_blocks=16_384, model=NEW, time_scale=0.02)
    with temporary_folder("warmroute-canary-") as folder:
        names = folder / "names.yaml"
        names.write_text(names_text(95, 5))
        async with mock_fleet(old, folder) as olds, mock_fleet(new, folder) as news:
            config = config_of(old, [*olds, *news], names)
            async with configured_router("router", config, folder) as router:
                running = asyncio.create_task(run(router.public, [(one, NAME) for one in many], clients))
                while not running.done() and not (first[-1].began_s and changed_s):
                    if first[-1].began_s and not changed_s:
                        names.write_text(names_text(90, 10))
                        changed_s = time.monotonic()
                    await asyncio.sleep(0.01)
                await running
                await clear_caches([*olds, *news])
                again = [Conversation(one.number, one.kind) for one in first]
                await run(router.public, [(a, one.models[0]) for a, one in zip(again, first, strict=True)], clients)
                changes = json.loads(await _get(router.admin, "/admin/changes"))
    reviews = [one["cause"] for one in changes if one["what"] == "names"]
    return "\n".join([report(first, others, again, changed_s), *(f"review: {one}" for one in reviews)])


async def _get(url: str, path: str) -> str:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        return (await client.get(path)).text


def main(
    conversations: Annotated[int, typer.Option(min=1, help="That begin before the weights change.")] = 4000,
    later: Annotated[int, typer.Option(min=1, help="That begin after it.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
    pods: Annotated[int, typer.Option(min=1, help="Mock engines of the old version; the new one has one.")] = 2,
) -> None:
    """Print shares, changes and hits."""
    print(asyncio.run(measure(conversations, later, clients, pods)))


if __name__ == "__main__":
    typer.run(main)
