"""Sends the demo's mix through a real router to running vLLM pods, and records what happened to each request.

The result has for each request what the router expected, what the engine reported and what the client measured, and the
blocks of its prompt, so that `simulated.py` can repeat it. All answers consist of one token: their lengths are exact,
and the tokens of an answer are the same when the next turn contains it as text.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loadtest.commands.child_processes import ChildError, RouterUrls, clear_caches, configured_router
from loadtest.gpu.fleet_record import MeasuredFleet, MeasuredRequest
from loadtest.simulator.traffic import hashed_request
from loadtest.traffic.chat_workload import ChatSession, prose, sessions
from loadtest.traffic.load_driver import LoadDriver, RequestResult, play
from router.cli.receipt_files import receipts_of
from router.config.load import shipped
from router.config.models import load_priors, prior_speed
from router.config.schema import CostPrior
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import ConfigError
from router.observe.receipts import Receipt
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, PodSpeed

STOP_RESERVE_S = 10.0
"""Part of the deadline for the end: the router stops, and the prompts are hashed."""
ANSWER_WORDS = (" the", " word", " yes", " hello", "\n")
REPEATS = 5
OVERHEAD_WORDS = (400, 800, 1200, 1600) * 3
OVERHEAD_ANSWER_TOKENS = 4
"""More than one: an idle pod reports its token sooner than one that already runs the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPod:
    """A running pod. Without endpoints the router asks the pod where it publishes KV events."""

    url: str
    kv_endpoint: str = ""
    replay_endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlanOnGpu:
    """One measurement: the served model, the router's prior, and the load.

    `tokenizer` is the folder of the model's tokenizer and chat template; `speed` replaces the row of `config/models`.
    Sessions start within `duration_s`; their later turns follow. The measurement ends `deadline_s` after its start.
    """

    model: str
    tokenizer: str
    chat_template: str | None = None
    block_size_tokens: int = 16
    cost_model: str = "llama-3.1-8b"
    cost_hardware: str = "h200x1"
    speed: PodSpeed | None = None
    policy: str = "cost_aware"
    sessions_per_s: float = 5.0
    duration_s: float = 20.0
    seed: int = 1
    deadline_s: float = 90.0

    @property
    def prior(self) -> PodSpeed:
        """The speed that the router starts with. Raises `ConfigError`."""
        row = CostPrior(model=self.cost_model, hardware=self.cost_hardware)
        return self.speed or prior_speed(load_priors(shipped("config") / "models"), row)

    def config(self, pods: Sequence[FleetPod], receipts: Path) -> dict[str, Any]:
        """The router's configuration."""
        model = {
            "name": self.model,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "block_size_tokens": self.block_size_tokens,
            "cost": {"model": self.cost_model, "hardware": self.cost_hardware},
        }
        listed = [self._pod_config(number, pod) for number, pod in enumerate(pods)]
        return {"models": [model], "pods": listed, "policy": self.policy, "receipts": str(receipts)}

    def _pod_config(self, number: int, pod: FleetPod) -> dict[str, Any]:
        config: dict[str, Any] = {"url": pod.url, "id": f"pod-{number}", "engine": "vllm"}
        if pod.kv_endpoint:
            config["kv_events"] = {"endpoint": pod.kv_endpoint, "replay_endpoint": pod.replay_endpoint or None}
        return config | ({"speed": asdict(self.speed)} if self.speed else {})


@dataclass(slots=True)
class _Recorded:
    """What is known of a run so far, also after an error."""

    receipts: Path
    served: list[RequestResult] = field(default_factory=list)
    calibration: dict[str, dict[str, float]] = field(default_factory=dict)
    unfinished_sessions: int = 0
    error: str = ""


async def measure_fleet(pods: Sequence[FleetPod], plan: FleetPlanOnGpu, folder: Path) -> dict[str, Any]:
    """The measurement as JSON values: `requests` in the order in which they were sent, and the facts of the run.

    `folder` receives the files of the router. If pods or router fail, `error` says why, and `requests` has what ended
    before. Raises `ConfigError` for a plan that cannot be run."""
    until_s = asyncio.get_running_loop().time() + plan.deadline_s - STOP_RESERVE_S
    tokenizer = load_tokenizer(TokenizerSource(plan.tokenizer, plan.chat_template), fast=False)
    mix = sessions(plan.seed, duration_s=plan.duration_s, sessions_per_s=plan.sessions_per_s)
    recorded = _Recorded(folder / f"receipts-{len(pods)}-{plan.seed}.jsonl")
    recorded.receipts.unlink(missing_ok=True)
    has_cleared = await _has_cleared(pods)
    try:
        async with asyncio.timeout_at(until_s) as deadline:
            async with configured_router(f"router-{len(pods)}", plan.config(pods, recorded.receipts), folder) as urls:
                deadline.reschedule(None)
                await _send(urls, mix, plan.model, answer_options(tokenizer), until_s, recorded)
    except TimeoutError:
        recorded.error = f"the router did not trust all pods within the deadline; its log is in {folder}"
    except (ChildError, httpx.HTTPError) as error:
        recorded.error = f"{type(error).__name__}: {error}"
    measured = MeasuredFleet(
        pods=len(pods),
        plan=asdict(plan),
        prior=plan.prior,
        block_size_tokens=plan.block_size_tokens,
        caches_cleared=has_cleared,
        planned_requests=sum(len(session.turns) for session in mix),
        unfinished_sessions=recorded.unfinished_sessions,
        error=recorded.error,
        request_errors=dict(Counter(one.error for one in recorded.served if one.error)),
        calibration=recorded.calibration,
        requests=_requests(recorded, tokenizer, plan.block_size_tokens),
    )
    values: dict[str, Any] = msgspec.to_builtins(measured)
    return values


def answer_options(tokenizer: Tokenizer) -> dict[str, Any]:
    """Options of the API with which every answer is one token, repeated until `max_tokens`.

    Raises `ConfigError` if no word of `ANSWER_WORDS` has the same tokens when it is read as text again."""
    for word in ANSWER_WORDS:
        tokens = tokenizer.encode(word * REPEATS)
        if len(tokens) == REPEATS and len(set(tokens)) == 1:
            return {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [tokens[0]]}
    raise ConfigError(f"the tokenizer has none of the words {ANSWER_WORDS} as one token")


async def chat_overhead_ms(pod: FleetPod, plan: FleetPlanOnGpu, speed: PodSpeed) -> float:
    """What an idle pod needs before the first token of a chat in addition to its prefill: HTTP, the chat template,
    tokens, scheduling. The median of a few new chats that are sent to it without a router."""
    random, options = Random(plan.seed), answer_options(load_tokenizer(TokenizerSource(plan.tokenizer), fast=False))
    driver, found = LoadDriver([pod.url], lambda _: None), []
    try:
        for words in OVERHEAD_WORDS:
            messages = [{"role": "user", "content": prose(random, words)}]
            asked = {"model": plan.model, "messages": messages, "max_tokens": OVERHEAD_ANSWER_TOKENS, **options}
            one = await driver.send(Endpoint.CHAT, asked, "overhead")
            if one.ttft_s is not None:
                found.append(one.ttft_s * 1000 - speed.prefill_ms(one.prompt_tokens, one.cached_tokens))
    finally:
        driver.close()
    return median(found) if found else math.nan


async def _has_cleared(pods: Sequence[FleetPod]) -> bool:
    """Whether all pods have emptied their prefix caches; vLLM does so only in its development mode."""
    try:
        await clear_caches([pod.url for pod in pods])
    except httpx.HTTPError:
        return False
    return True


async def _send(
    urls: RouterUrls,
    mix: Sequence[ChatSession],
    model: str,
    options: Mapping[str, Any],
    until_s: float,
    recorded: _Recorded,
) -> None:
    """Play all sessions, at most `until_s` of the loop's clock, then read what the router has learnt."""
    driver = LoadDriver([urls.public], lambda _: None)
    tasks = [asyncio.create_task(play(driver, model, session, options)) for session in mix]
    try:
        _, late = await asyncio.wait(tasks, timeout=max(until_s - asyncio.get_running_loop().time(), 0.0))
        recorded.unfinished_sessions = len(late)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        driver.close()
        recorded.served = [one for one in driver.served if one.e2e_s]  # the others were cancelled
    async with httpx.AsyncClient(base_url=urls.admin, trust_env=False) as client:
        recorded.calibration = _calibration((await client.get("/metrics")).text)


def _calibration(metrics: str) -> dict[str, dict[str, float]]:
    """What the router has learnt of the pods as a class: coefficients, confidence 0 to 1, and the mean relative error
    of recent expected times by the prior and by the calibration."""
    found: dict[str, dict[str, float]] = {"coefficient": {}, "confidence": {}, "error_ratio": {}}
    for family in text_string_to_metric_families(metrics):
        kind = family.name.removeprefix("warmroute_calibration_")
        for sample in family.samples if kind in found else ():
            labels = sample.labels
            if not labels["pod"]:
                found[kind][labels.get("coefficient") or labels.get("by") or labels["subject"]] = sample.value
    return found


# --- the records ---


def _requests(recorded: _Recorded, tokenizer: Tokenizer, block_size_tokens: int) -> list[MeasuredRequest]:
    """The requests that were answered, in the order in which they were sent."""
    receipts = _receipts(recorded.receipts)
    template, numbers = ChatTemplate(tokenizer), dict[int, int]()
    found = []
    for one in sorted(recorded.served, key=lambda one: one.sent_s):
        if not one.error and one.ttft_s is not None:
            prompt, answer = tokenizer.encode(template.render(one.asked)), tokenizer.encode(one.text)
            hashes = hashed_request(prompt, answer, block_size_tokens).blocks
            blocks = [numbers.setdefault(block, len(numbers)) for block in hashes]
            agree = (len(prompt), len(answer)) == (one.prompt_tokens, one.output_tokens)
            found.append(_request(one, receipts.get(one.id), agree, blocks))
    return found


def _request(one: RequestResult, receipt: Receipt | None, agree: bool, blocks: list[int]) -> MeasuredRequest:
    assert one.ttft_s is not None
    return MeasuredRequest(
        kind=one.kind,
        sent_s=one.sent_s,
        late_ms=one.late_s * 1000,
        pod=one.pod,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        cached_tokens=one.cached_tokens,
        predicted_cached_tokens=one.predicted_cached_tokens,
        ttft_ms=(one.ttft_s - one.late_s) * 1000,
        e2e_ms=(one.e2e_s - one.late_s) * 1000,
        expected_ttft_ms=receipt.predicted_ms if receipt else None,
        router_ttft_ms=receipt.ttft_ms if receipt else None,
        router_phases_ms=receipt.phases_ms if receipt else {},
        tokens_agree=agree,
        blocks=blocks,
    )


def _receipts(file: Path) -> dict[str, Receipt]:
    """By id; none if the router did not write its file."""
    try:
        return {one.id: one for one in receipts_of(file)}
    except ConfigError:
        return {}
