"""Does the simulator say what real vLLM pods do? The last rung of its ladder, after `lab/simulator/test_belief.py`.

Two pods of a random model that is large enough to compute for longer than HTTP takes, each on a core of its own and
with room for a few conversations only; their speed is measured first. Then the same requests go through a real router
at them and, sent at the same times, through the simulator. How much of its core each pod had meanwhile the kernel says:
the simulator's pods are slower by that, because other programs on this machine are nothing that it should foresee.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from loadtest.simulator.scenario import Conditions, SimulatedFleet, SimulatedPod
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from loadtest.simulator.virtual_pod import VirtualPodConfig
from loadtest.simulator.world import World
from loadtest.traffic.load_driver import LoadDriver, RequestResult
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.hashing import hash_blocks, token_array
from router.types import Endpoint, PrefixTrust
from tests.kit.scenes import make_pod
from tests.live.calibrate import ANSWER_TOKEN, Calibration, asked, calibrate, made_up, slowness, thread_times
from tests.live.engines import BLOCK_TOKENS, EngineProcess
from tests.live.router_process import router
from tests.live.slow_pods import KV_BLOCKS, MODEL, STEP_TOKENS, slow_pods, speed_of

__all__ = ["slow_pods"]

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

POLICY = "cost_aware"
SESSIONS = 55
SESSIONS_PER_S = 0.85
SYSTEM_PROMPTS_TOKENS = (300, 450, 600, 800)
ROUTE_MS = 1.5
"""What the way through the router adds here to the time to first token, as measured."""
HIT_SHARE_OFF = 0.03
TTFT_OFF = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, when to send it, and how long its answer is."""

    due_s: float
    prompt: list[int]
    output_tokens: int


def workload(random: Random) -> list[Request]:
    """Chats of up to five turns behind one of four system prompts, and prompts that nobody else sends. Times are drawn
    beforehand, of later turns too; about 120 requests."""
    systems = [made_up(random, tokens) for tokens in SYSTEM_PROMPTS_TOKENS]
    requests: list[Request] = []
    start_s = 0.0
    for _ in range(SESSIONS):
        start_s += random.expovariate(SESSIONS_PER_S)
        if random.random() < 0.35:
            requests.append(Request(start_s, made_up(random, random.randint(200, 1200)), random.randint(8, 32)))
        else:
            requests += chat(random, start_s, random.choice(systems))
    return sorted(requests, key=lambda one: one.due_s)


def chat(random: Random, start_s: float, system: Sequence[int]) -> Iterator[Request]:
    """Each turn is asked with all that was said before."""
    said, due_s = list(system), start_s
    for _ in range(random.randint(1, 5)):
        said += made_up(random, random.randint(40, 300))
        request = Request(due_s, list(said), random.randint(8, 32))
        yield request
        said += [ANSWER_TOKEN] * request.output_tokens
        due_s += 3.0 + random.expovariate(0.3)


async def test_real_pods_do_what_the_simulator_says(slow_pods: list[EngineProcess], tmp_path: Path) -> None:
    """Hit share within 3 points and mean TTFT within 20 %, by the speed that each pod showed when it was alone."""
    pods = slow_pods
    found = [await calibrate(pod, Random(number)) for number, pod in enumerate(pods)]
    requests = workload(Random(4))
    config = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL), "block_size_tokens": BLOCK_TOKENS}],
        "pods": [
            {"url": pod.url, "engine": "vllm", "speed": speed_of(one)} for pod, one in zip(pods, found, strict=True)
        ],
        "policy": POLICY,
    }
    with router(tmp_path, config) as urls:
        before = [thread_times(pod) for pod in pods]
        served = await send_all(urls.public, requests)
        slow = [slowness(times, thread_times(pod)) for times, pod in zip(before, pods, strict=True)]
    assert not [one.error for one in served if one.error]
    measured = Figures.of(
        [one.cached_tokens for one in served], [one.prompt_tokens for one in served], [ttft_ms(one) for one in served]
    )
    true = [one.at(times) for one, times in zip(found, slow, strict=True)]
    expected = simulated(found, true, requests, [one.sent_s for one in served])
    print(
        *(f"alone     {one}\nat work   {other.slowness:.2f}" for one, other in zip(found, true, strict=True)), sep="\n"
    )
    print(f"measured  {measured}\nsimulated {expected}")
    assert abs(expected.hit_share - measured.hit_share) <= HIT_SHARE_OFF
    assert expected.ttft_mean_ms == pytest.approx(measured.ttft_mean_ms, rel=TTFT_OFF)


@dataclass(frozen=True, slots=True)
class Figures:
    """The compared figures, and others that help to explain a difference."""

    hit_share: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float

    @classmethod
    def of(cls, cached_tokens: Sequence[int], prompt_tokens: Sequence[int], ttft_ms: Sequence[float]) -> Figures:
        """Over all requests."""
        p50_ms, p90_ms = np.percentile(ttft_ms, (50, 90))
        return cls(sum(cached_tokens) / sum(prompt_tokens), float(np.mean(ttft_ms)), float(p50_ms), float(p90_ms))

    def __str__(self) -> str:
        times = (("mean", self.ttft_mean_ms), ("p50", self.ttft_p50_ms), ("p90", self.ttft_p90_ms))
        return f"hit {self.hit_share:6.1%}  TTFT" + "".join(f"  {name} {ms:5.0f} ms" for name, ms in times)


async def send_all(url: str, requests: Sequence[Request]) -> list[RequestResult]:
    """Each at its time, independently of the others; in the order of `requests`."""
    driver = LoadDriver([url], lambda _: None)

    async def send(one: Request) -> RequestResult:
        await driver.until(one.due_s)
        return await driver.send(Endpoint.COMPLETIONS, asked(one.prompt, one.output_tokens), "any", one.due_s)

    try:
        return await asyncio.gather(*map(send, requests))
    finally:
        driver.close()


def ttft_ms(one: RequestResult) -> float:
    """Since it was really sent, which is also its time in the simulation."""
    assert one.ttft_s is not None
    return (one.ttft_s - one.late_s) * 1000


def simulated(
    known: Sequence[Calibration], true: Sequence[Calibration], requests: Sequence[Request], sent_s: Sequence[float]
) -> Figures:
    """The same requests at the same times, on pods with their true speed and the speed that the router assumed."""
    fleet = SimulatedFleet(tuple(map(simulated_pod, range(len(known)), known, true)))
    overhead_ms = sum(one.overhead_ms for one in true) / len(true)
    conditions = Conditions(route_ms=ROUTE_MS, overhead_ms=overhead_ms, event_delay_ms=10.0, scrape_ms=250.0)
    policy = load_policies(shipped("policies"))[POLICY]
    world = World(fleet, policy, conditions, block_size_tokens=BLOCK_TOKENS)
    sessions = sorted(
        (Session(at_s, (ask(one),)) for one, at_s in zip(requests, sent_s, strict=True)), key=lambda one: one.start_s
    )
    outcomes = world.run(Traffic(BLOCK_TOKENS, sessions)).outcomes
    return Figures.of(
        [one.cached_tokens for one in outcomes],
        [one.prompt_tokens for one in outcomes],
        [one.ttft_ms for one in outcomes],
    )


def simulated_pod(number: int, known: Calibration, true: Calibration) -> SimulatedPod:
    """As configured in the router, and as vLLM was started; vLLM never allocates one of its blocks."""
    pod = make_pod(
        f"pod-{number}",
        speed=known.speed,
        models=("tiny",),
        block_size_tokens=BLOCK_TOKENS,
        trust=PrefixTrust.TRUSTED,
    )
    config = VirtualPodConfig(
        speed=true.speed,
        kv_tokens=(KV_BLOCKS - 1) * BLOCK_TOKENS,
        engine_block_tokens=BLOCK_TOKENS,
        step_budget_tokens=STEP_TOKENS,
        max_num_seqs=16,
    )
    return SimulatedPod(pod, config)


def ask(one: Request) -> TrafficRequest:
    """With its full blocks, including those of the answer."""
    tokens = token_array([*one.prompt, *[ANSWER_TOKEN] * one.output_tokens])
    blocks = hash_blocks(tokens, BLOCK_TOKENS, 0)
    return TrafficRequest(len(one.prompt), one.output_tokens, blocks, len(one.prompt) // BLOCK_TOKENS)
