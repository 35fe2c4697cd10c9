"""Who serves when all pods of a name are killed, and for how much money, over HTTP?

    python -m loadtest.faults.provider_outage

Three routers share Valkey. A name has a model, another model as its fallback, and a provider as the last: a mock engine
with a key and a price, which counts what it bills. The engines of the first model are killed under load, then those of
the second. Another name falls back to a second provider whose budget is soon used. One tenant's data stays.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import (
    Child,
    FleetPlan,
    cancel_on_sigterm,
    child,
    configured_router,
    engine_arguments,
    priced_config,
    temporary_folder,
)
from loadtest.mock_engine.vocabulary import WORDS
from tests.redis_process import redis_process

FIRST, SECOND, HOSTED, SMALL = "chat-1", "chat-2", "hosted", "small"
PRICE = {"prompt": 2.5, "cached": 1.25, "output": 10.0}
KEY = "the-key-of-the-provider"
ROUTERS, ANSWER_TOKENS = 3, 12
MOST_TOKENS = 64
"""What requests allow for an answer: a budget counts as many until their end."""
BUDGET = 0.12
TENANTS = ("acme", "bank")


@dataclass(slots=True)
class Answers:
    """Answers by who gave them. `failed`: of requests that began after the latest kill was complete."""

    by: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    """Failures of those that were under way when engines were killed."""
    killed_s: float = 0.0


@dataclass(slots=True)
class Clients:
    """They send to the routers in turn, half of them streams."""

    urls: Sequence[str]
    client: httpx.AsyncClient
    answers: Answers = field(default_factory=Answers)
    numbers: count[int] = field(default_factory=count)

    async def ask(self, model: str, tenant: str = "acme") -> httpx.Response:
        number = next(self.numbers)
        text = " ".join(WORDS[(number * 31 + at * 7) % len(WORDS)] for at in range(120))
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": f"{number} {text}"}]}
        body |= {"max_tokens": ANSWER_TOKENS if model == "chat" else MOST_TOKENS, "stream": number % 2 == 0}
        url, headers = self.urls[number % len(self.urls)], {"authorization": f"Bearer {tenant}"}
        return await self.client.post(f"{url}/v1/chat/completions", json=body, headers=headers)

    async def steadily(self, model: str, requests: int, at_once: int) -> None:
        left = iter(range(requests))

        async def one_after_the_other() -> None:
            for _ in left:
                await self._ask_counted(model)

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))

    async def _ask_counted(self, model: str) -> None:
        began_s = time.monotonic()
        try:
            answer = await self.ask(model)
        except httpx.HTTPError as error:
            said = repr(error)
        else:
            is_whole = b"[DONE]" in answer.content or b'"usage"' in answer.content
            if answer.status_code == 200 and is_whole:
                self.answers.by[answer.headers["x-warmroute-model"]] += 1
                return
            said = f"{answer.status_code} {answer.text[:300]}"
        (self.answers.failed if began_s > self.answers.killed_s else self.answers.begun)[said] += 1

    async def until(self, answers: int) -> None:
        while self.answers.by.total() + self.answers.failed.total() < answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(plan: FleetPlan, name: str, folder: Path, *options: str) -> AsyncIterator[tuple[Child, list[str]]]:
    """Mock engines that may be killed."""
    with child(name, [*engine_arguments(plan, 0), "--count", str(plan.pods), *options], folder) as found:

        async def announced() -> list[str] | None:
            lines = found.output.read_text().splitlines()
            return [json.loads(line)["url"] for line in lines] if len(lines) == plan.pods else None

        yield found, await found.until(announced)


def files(folder: Path) -> dict[str, Any]:
    """Names, tenants and the provider's key."""
    (folder / "key").write_text(KEY)
    (folder / "names.yaml").write_text(
        f"names:\n- {{name: chat, to: {FIRST}, fallbacks: [{SECOND}, {HOSTED}]}}\n"
        f"- {{name: cheap, to: {FIRST}, fallbacks: [{SMALL}]}}\n"
    )
    tenants = [{"name": one, "keys": [sha256(one.encode()).hexdigest()]} for one in TENANTS]
    tenants[1]["data"] = "stay"
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
    return {"names": str(folder / "names.yaml"), "tenants": str(folder / "tenants.yaml")}


def provider(name: str, url: str, folder: Path, budget: float) -> dict[str, Any]:
    where = {"url": url, "model": f"{name}-there", "key_file": str(folder / "key")}
    return {"name": name, **where, "price": PRICE, "budget_per_hour": budget, "max_output_tokens": MOST_TOKENS}


async def billed(client: httpx.AsyncClient, url: str) -> tuple[int, float]:
    """The provider's own count: answers and money."""
    text = (await client.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"})).text
    return int(_of("answers", text)), _of("money", text)


def _of(name: str, text: str) -> float:
    found = re.search(rf"mock_billed_{name}_total (\S+)", text)
    assert found is not None
    return float(found[1])


def bills(folder: Path, model: str) -> tuple[int, float]:
    """Answers and money in the files of usage of all routers."""
    lines = [json.loads(line) for file in folder.glob("usage-*.jsonl") for line in file.read_text().splitlines()]
    money = [line["money"] for line in lines if line["model"] == model and line["result"] == "ok"]
    return len(money), sum(money)


async def outage(clients: Clients, requests: int, at_once: int, fleets: Sequence[Child]) -> str:
    """Kill one fleet after the other, each when half of a part of the requests is answered."""
    for number in range(len(fleets) + 1):
        running = asyncio.create_task(clients.steadily("chat", requests, at_once))
        if number < len(fleets):
            await clients.until(number * requests + requests // 2)
            fleets[number].process.kill()
            fleets[number].process.wait()
            clients.answers.killed_s = time.monotonic()
        await running
    one = clients.answers
    stayed = await clients.ask("chat", "bank")
    said = stayed.json()["error"]["message"]
    lines = [
        f"answers: {dict(one.by)}; failed of those not begun: {one.failed.total()} {dict(one.failed.most_common(2))}",
        f"failed of those under way when engines were killed: {one.begun.total()} {dict(one.begun.most_common(2))}",
        f"tenant whose data stays: {stayed.status_code} {said}",
    ]
    return "\n".join(lines)


async def measure(requests: int, at_once: int) -> str:
    cancel_on_sigterm()
    usual: dict[str, Any] = {"num_blocks": 16_384, "time_scale": 0.02}
    priced = ("--api-key", KEY, "--price", ",".join(map(str, PRICE.values())))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder, redis = stack.enter_context(temporary_folder("warmroute-outage-")), stack.enter_context(redis_process())
        first, firsts = await enter(fleet(FleetPlan(pods=2, model=FIRST, **usual), "first", folder))
        second, seconds = await enter(fleet(FleetPlan(pods=1, model=SECOND, **usual), "second", folder))
        hosted = dict[str, str]()
        for name in (HOSTED, SMALL):
            plan = FleetPlan(pods=1, model=f"{name}-there", **usual)
            hosted[name] = (await enter(fleet(plan, name, folder, *priced)))[1][0]
        config = priced_config([*firsts, *seconds], FleetPlan(pods=3, model=FIRST, **usual)) | files(folder)
        config["models"] = [{**config["models"][0], "name": name} for name in (FIRST, SECOND)]
        config["index"] = {"redis": {"url": redis.url}}
        budgets = {HOSTED: 100.0, SMALL: BUDGET}
        config["providers"] = [provider(name, hosted[name], folder, budget) for name, budget in budgets.items()]
        urls = list[str]()
        for number in range(ROUTERS):
            usage = {"usage": {"file": str(folder / f"usage-{number}.jsonl")}}
            urls.append((await enter(configured_router(f"router-{number}", config | usage, folder))).public)
        client = await enter(httpx.AsyncClient(timeout=60, trust_env=False))
        lines = [await outage(Clients(urls, client), requests, at_once, [first, second])]
        cheap = Clients(urls, client)
        await cheap.steadily("cheap", 3 * requests, at_once)
        await asyncio.sleep(1.5)  # the files of usage are written
        spent, refused = await billed(client, hosted[SMALL]), cheap.answers.failed
        share = f"{spent[1] / BUDGET:.2%}"
        lines.append(
            f"budget of {BUDGET}, {ROUTERS} routers: {spent[1]:.6f} spent ({share}), {refused.total()} refused"
        )
        lines += [f"  {what}: {times}" for what, times in refused.most_common(2)]
        for name in (HOSTED, SMALL):
            lines.append(f"{name}: bills {bills(folder, name)}, its own count {await billed(client, hosted[name])}")
        logs = [path.read_text() for path in folder.iterdir() if path.name != "key" and path.is_file()]
        lines.append(f"files of routers that contain the key: {sum(KEY in one for one in logs)} of {len(logs)}")
    return "\n".join(lines)


def main(
    requests: Annotated[int, typer.Option(min=10, help="In each of three parts.")] = 1200,
    clients: Annotated[int, typer.Option(min=1, help="At a time.")] = 24,
) -> None:
    """Print who served, what failed, and the money."""
    print(asyncio.run(measure(requests, clients)))


if __name__ == "__main__":
    typer.run(main)
