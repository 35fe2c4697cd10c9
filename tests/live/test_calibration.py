"""A router learns the speed of real pods.

Its prior is three times too slow. After ordinary requests its predictions must match the observed times, and its
coefficients those measured on the idle pods.
"""

from __future__ import annotations

import statistics
from dataclasses import fields
from pathlib import Path
from random import Random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.cli.receipt_files import receipts_of
from router.types import PodSpeed
from tests.live.calibrate import calibrate
from tests.live.engines import BLOCK_TOKENS, EngineProcess
from tests.live.router_process import router
from tests.live.slow_pods import MODEL, slow_pods, speed_of
from tests.live.test_simulator import send_all, workload

__all__ = ["slow_pods"]

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

WRONG = 3.0
LEARNT_AFTER = 100


async def test_a_wrong_prior_is_corrected_by_observed_times(
    slow_pods: list[EngineProcess],
    tmp_path: Path,
) -> None:
    """A prompt of 1,000 new tokens is priced within 20 % of the measured time; predicted times lose most of their
    error."""
    pods = slow_pods
    found = [await calibrate(pod, Random(number)) for number, pod in enumerate(pods)]
    speeds = [{name: ms * WRONG for name, ms in speed_of(one).items()} for one in found]
    receipts = tmp_path / "receipts.jsonl"
    config = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL), "block_size_tokens": BLOCK_TOKENS}],
        "pods": [{"url": pod.url, "engine": "vllm", "speed": speed} for pod, speed in zip(pods, speeds, strict=True)],
        "receipts": str(receipts),
    }
    with router(tmp_path, config) as urls:
        for seed in (11, 12):
            await send_all(urls.public, workload(Random(seed)))
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{urls.admin}/metrics")).text
    rows = receipts_of(receipts)
    times = [(one.predicted_ms, one.ttft_ms) for one in rows if one.predicted_ms is not None and one.ttft_ms]
    early, late = _error(times[:20]), _error(times[LEARNT_AFTER:])
    learnt = _coefficients(metrics)
    print(f"\nlearned {learnt}\nmeasured {[(one.speed, one.overhead_ms) for one in found]}")
    print(f"error of the first 20: {early:.0%}, after {LEARNT_AFTER}: {late:.0%} of {len(times)}")
    measured_ms = statistics.fmean(one.overhead_ms + one.speed.prefill_ms(1000) for one in found)
    speed = PodSpeed(*(learnt[field.name] for field in fields(PodSpeed)[: len(learnt)]))
    assert speed.prefill_ms(1000) == pytest.approx(measured_ms, rel=0.2)
    assert late < early / 2


def _error(times: list[tuple[float, float]]) -> float:
    """Error of the sum: single prompts wait for running steps, which cannot be predicted."""
    return sum(abs(expected - actual) for expected, actual in times) / sum(actual for _, actual in times)


def _coefficients(metrics: str) -> dict[str, float]:
    """The calibration of the pod class."""
    return {
        sample.labels["coefficient"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "warmroute_calibration_coefficient" and not sample.labels["pod"]
    }
