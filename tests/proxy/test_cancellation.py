"""A client that disconnects leaves nothing behind, in whichever callback of the event loop that happens.

Each scenario is run once for each callback, and its request is cancelled before that one.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import pytest

from router.decision import Candidate, Cost, Direct, Plan, Pull, RouteDecision, Split
from router.frontends.prompt_readers import EnginePromptReader
from router.hashing import hash_array, token_array
from router.types import Generation, PromptPrefix
from tests.kit.scripted_pods import LONGER_S, Asked, Behaviour, Client, ScriptedPod, Town
from tests.kit.step_loop import StepLoop
from tests.proxy.test_kv_transfer import ANSWERING, OFFERING, TOKEN, answer, refusing_handoffs, saying, usage

PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array(range(1, 4)))
CALLBACKS = 2000
"""No request takes that many."""

Plans = Callable[[Town], Iterable[Plan]]


@dataclass(frozen=True)
class Scenario:
    """A request: its plans, best first, and what the pods do."""

    plans: Plans
    pods: dict[str, Behaviour]
    stream: bool = False
    slow: bool = False
    """The client can take nothing for two turns after each piece."""
    connected: bool = False
    """A connection to the pod is open."""
    tokenizer: str = ""
    """The pod that tokenizes prompts."""


class SlowClient(Client):
    """Cannot take more at once."""

    def put(self, piece: bytes) -> bool:
        super().put(piece)
        return False

    async def ready(self) -> None:
        for _ in range(2):
            await asyncio.sleep(0)


def after(turns: int, behaviour: Behaviour) -> Behaviour:
    """The same, that many turns of the event loop later."""

    async def behave(asked: Asked) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await behaviour(asked)

    return behave


async def streaming(asked: Asked) -> None:
    """Two tokens, each in a turn of its own."""
    await asked.begin()
    for event in (TOKEN, TOKEN, {"choices": [], "usage": usage(16)}, "[DONE]"):
        await asyncio.sleep(0)
        await asked.event(event)
    await asked.end()


async def ending_at_once(asked: Asked) -> None:
    """The end arrives together with the last token."""
    await asked.begin()
    for end in (b"", b"0\r\n\r\n"):
        await asyncio.sleep(0)
        await asked.send(b"13\r\n" + b'{"content": "more"}' + b"\r\n" + end)


async def beginning(asked: Asked) -> None:
    """Sends the head of a stream, and no token."""
    await asked.begin()
    await asked.hung_up()


async def tokenizing(asked: Asked) -> None:
    await asked.answer({"tokens": [1, 2, 3], "count": 3} if asked.target == "/tokenize" else answer())


async def breaking(asked: Asked) -> None:
    asked.hang_up()


async def breaking_handoffs(asked: Asked) -> None:
    """Serves requests without a handoff, closes the connection of others."""
    if "bootstrap_room" in asked.body:
        await breaking(asked)
    else:
        await ANSWERING(asked)


def split(dialect: str) -> Plans:
    """The pair, then the decode pod alone."""

    def plans(pods: Town) -> list[Plan]:
        prefill, decode = (replace(pods.pod(name), handoff=dialect) for name in ("p", "d"))
        return [Split(prefill, decode), Direct(decode)]

    return plans


def pair_only(pods: Town) -> list[Plan]:
    return [*split("bootstrap")(pods)][:1]


def alone(*names: str) -> Plans:
    return lambda pods: [Direct(pods.pod(name)) for name in names]


def pulling(pods: Town) -> list[Plan]:
    return [Direct(pods.pod("a"), Pull("holder", 32)), Direct(pods.pod("a"))]


DELAYS = tuple(product((0, 1, 3), repeat=2))
"""Turns after which the prefill pod and the decode pod respond."""
SCENARIOS = {
    "unary": Scenario(alone("a"), {"a": ANSWERING}),
    "stream": Scenario(alone("a"), {"a": streaming}, stream=True),
    "stream to a slow client": Scenario(alone("a"), {"a": streaming}, stream=True, slow=True),
    "end for a slow client": Scenario(alone("a"), {"a": ending_at_once}, stream=True, slow=True),
    "kept-alive connection": Scenario(alone("a"), {"a": ANSWERING}, connected=True),
    "kept-alive connection, stream": Scenario(alone("a"), {"a": streaming}, stream=True, connected=True),
    "prompt tokenized by a pod": Scenario(alone("a"), {"a": tokenizing}, tokenizer="a"),
    "busy pod": Scenario(alone("b", "a"), {"b": saying({}, 503), "a": streaming}, stream=True),
    "broken pod": Scenario(alone("b", "a"), {"b": breaking, "a": ANSWERING}),
    "pull": Scenario(pulling, {"a": streaming, "holder": ANSWERING}, stream=True),
    "refused pull": Scenario(pulling, {"a": refusing_handoffs(400), "holder": ANSWERING}),
    "in turn": Scenario(split("nixl"), {"p": OFFERING, "d": ANSWERING}),
    "in turn, stream": Scenario(split("nixl"), {"p": OFFERING, "d": streaming}, stream=True),
    "in turn, failing prefill": Scenario(split("nixl"), {"p": saying({}, 500), "d": ANSWERING}),
    "in turn, failing decode": Scenario(split("nixl"), {"p": OFFERING, "d": refusing_handoffs(500)}),
    **{
        f"at once, {prefill}/{decode}": Scenario(
            split("bootstrap"), {"p": after(prefill, OFFERING), "d": after(decode, streaming)}, stream=True
        )
        for prefill, decode in DELAYS
    },
    "at once, unary": Scenario(split("p2p"), {"p": OFFERING, "d": after(2, ANSWERING)}),
    "at once, failing prefill": Scenario(split("p2p"), {"p": after(1, saying({}, 500)), "d": ANSWERING}),
    "at once, refused prefill": Scenario(split("p2p"), {"p": saying({}, 400), "d": after(2, ANSWERING)}),
    "at once, refused after the decode pod's headers": Scenario(
        pair_only, {"p": after(6, saying({}, 400)), "d": beginning}
    ),
    "at once, failing decode": Scenario(split("p2p"), {"p": OFFERING, "d": after(1, refusing_handoffs(500))}),
    "at once, broken decode": Scenario(split("bootstrap"), {"p": OFFERING, "d": breaking_handoffs}),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_client_that_leaves_at_any_point_leaves_nothing(scenario: Scenario) -> None:
    """No lease, connection, task, timer, exception or KV on a prefill pod; and the next request is served."""
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        left = runner.run(_cancel_everywhere(scenario))
        gc.collect()
        assert not left
        assert not runner.get_loop().problems  # type: ignore[attr-defined]


async def _cancel_everywhere(scenario: Scenario) -> dict[int, list[str]]:
    """What is left over, by the callback before which the request was cancelled."""
    found = {}
    for callback in count(1):
        assert callback < CALLBACKS
        cancelled, left = await _cancel_before(callback, scenario)
        if left:
            found[callback] = left
        if not cancelled:
            assert callback > 5, "the request took almost no callbacks"
            return found
    raise AssertionError


async def _cancel_before(callback: int, scenario: Scenario) -> tuple[bool, list[str]]:
    """Whether the request was still served before that callback, and what is left over."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StepLoop)
    loop.pods = {name: ScriptedPod(behaviour) for name, behaviour in scenario.pods.items()}
    pods = Town(loop.pods, {name: f"http://{name}" for name in loop.pods}, LONGER_S, retries=2)
    pods.read_prompt = PROMPT
    if scenario.tokenizer:
        tokenizer = pods.pod(scenario.tokenizer)
        reader = EnginePromptReader(PROMPT.generation, pods.pools.of, lambda model: [tokenizer], lambda *why: None)
        pods.read = reader.read  # type: ignore[assignment, method-assign]
    if scenario.connected:
        await _serve(pods, scenario)
        await loop.settle()
    client = SlowClient() if scenario.slow else Client()
    serving = asyncio.create_task(_serve(pods, scenario, client))

    def leave() -> None:
        client.disconnected = True
        serving.cancel()

    loop.interrupt_before(callback, leave)
    await asyncio.wait({serving})
    cancelled = loop.interrupted
    loop.interrupt_before(0, leave)
    await loop.settle()
    if not cancelled:
        assert client.finished
    left = [*leftovers(pods, loop)]
    await _serve(pods, scenario)
    pods.pools.close()
    await loop.settle()
    timers = [f"timer {timer}" for timer in loop.timers() if "_tell_time(" not in repr(timer)]  # assumes a token
    return cancelled, [*left, *leftovers(pods, loop), *timers]


async def _serve(pods: Town, scenario: Scenario, client: Client | None = None) -> None:
    """Serve a request through all phases, with the scenario's candidates."""
    context = pods.context(stream=scenario.stream)
    candidates = tuple(Candidate(plan, Cost.of((), 10.0), 7) for plan in scenario.plans(pods))
    decided = RouteDecision("scripted", "1", candidates)
    decisions: Any = pods.core.decisions
    decisions.decide = lambda context, _now_s: setattr(context, "decision", decided)
    await pods.forward(context, client)


def leftovers(pods: Town, loop: StepLoop) -> Iterator[str]:
    """What remains of the requests of these pods, once no callback is ready."""
    if inflight := pods.ledger.inflight():
        yield f"leases {inflight}"
    if in_flight := pods.counted("warmroute_in_flight_requests"):
        yield f"{in_flight} requests in flight"
    gone = pods.counted("warmroute_requests_total", result="client_gone")
    if gone != (counted := pods.counted("warmroute_cancellations_total")):
        yield f"{counted} cancellations by phase of {gone}"
    for name, pod in pods.made.items():
        idle = len(pods.pools.of(pods.pod(name))._idle)
        if pod.connected != idle:
            yield f"{pod.connected} connections to pod {name}, {idle} of them idle"
        sent = pods.store.predicted._pods[name].open.values() if name in pods.store.predicted._pods else ()
        if pending := [one for alike in sent for one in alike if one.until_s == math.inf]:
            yield f"predictions {pending} for pod {name}"
        if waiting := pods.calibrator.clock(name)._waiting:
            yield f"prefills {waiting} of pod {name}"
    if "p" in pods.made and pods.made["p"].behaviour is OFFERING:
        params = [asked.body.get("kv_transfer_params", {}) for pod in pods.made.values() for asked in pod.asked]
        held, read = (sum(one.get(key) is True for one in params) for key in ("do_remote_decode", "do_remote_prefill"))
        if held > read and "bootstrap_room" not in pods.made["p"].asked[0].body:
            yield f"{held} responses of the prefill pod, whose KV was read or released {read} times"
    connections = sum(pod.connected for pod in pods.made.values())
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    if len(tasks) != connections:
        yield f"tasks {tasks}"
