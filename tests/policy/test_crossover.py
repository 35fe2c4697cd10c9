"""From how many tokens on is it better to fetch them than to compute them? As the cost model's table says."""

from __future__ import annotations

from functools import lru_cache

import pytest

from router.config.load import shipped
from router.config.models import load_priors
from router.decision import Pull
from router.policy.decide import decide
from router.types import InFlight, Link, Links, Pod, PodSpeed, PrefixMatch, PromptPrefix, Scene
from tests.kit.scenes import BLOCK, pod, policy, prompt, ready, scene

PULLING = policy("queue", "prefill", "transfer")
FAR_TOO_LONG_MS = 1e7
MOST_BLOCKS = 200_000
STARTS_MS = (5.0, 30.0, 1200.0)

TABLE: dict[tuple[str, str], dict[float, tuple[float, ...]]] = {
    ("llama-3.1-8b", "h100x1"): {4.0: (32e3, 34e3, 73e3), 12.1: (528, 2.8e3, 44e3), 49.5: (288, 1.6e3, 37e3)},
    ("qwen3-32b", "h100x2"): {4.0: (19e3, 21e3, 49e3), 12.1: (176, 1.0e3, 25e3), 49.5: (112, 672, 20e3)},
    ("llama-3.1-70b", "h100x4"): {4.0: (41e3, 42e3, 73e3), 12.1: (144, 864, 25e3), 49.5: (96, 544, 19e3)},
    ("llama-3.1-70b", "h100x8"): {4.0: (173e3,), 12.1: (448, 2.5e3, 50e3), 49.5: (160, 944, 30e3)},
    ("deepseek-v3", "h200x8"): {4.0: (240, 1.4e3, 32e3), 12.1: (160, 896, 26e3), 49.5: (144, 800, 24e3)},
}
"""docs/cost-model.md#crossover: by model and hardware, by GB/s, tokens for each t0 of `STARTS_MS`."""
CASES = [
    pytest.param(*which, t0_ms, gb_per_s, tokens, id=f"{'-'.join(which)}-{gb_per_s}-{t0_ms:g}")
    for which, by_link in TABLE.items()
    for gb_per_s, row in by_link.items()
    for t0_ms, tokens in zip(STARTS_MS, row, strict=False)
]


@lru_cache
def facts_of(model: str, hardware: str) -> tuple[PodSpeed, int]:
    """What we ship for it: coefficients, KV bytes a token."""
    prior = load_priors(shipped("config") / "models")[model]
    return prior.hardware[hardware].speed(), prior.kv_bytes_per_token


def two_pods(model: str, hardware: str, link: Link, blocks: int, transfers: int) -> Scene:
    """`holder` has that number of blocks and a queue so long that no request waits for it; `idle` has none."""
    speed, kv_bytes = facts_of(model, hardware)
    facts = {"speed": speed, "kv_bytes_per_token": kv_bytes, "pulls": "nixl"}
    pods: list[Pod] = [pod("holder", **facts), pod("idle", **facts)]
    tokens = blocks * BLOCK + 1
    return scene(
        *ready(*pods),
        prompt=PromptPrefix(prompt(0).generation, range(tokens), range(blocks)),
        match=PrefixMatch({"holder": (blocks, 0, 0, 0)}),
        inflight={"holder": InFlight(1, 1, prefill_ms=FAR_TOO_LONG_MS, pulls=transfers)},
        links=Links(elsewhere=link),
    )


def crossover_tokens(model: str, hardware: str, t0_ms: float, gb_per_s: float, transfers: int = 0) -> int:
    """The fewest held tokens that `decide()` fetches, by halves."""
    link = Link(t0_ms, gb_per_s * 1e6)
    low, high = 0, MOST_BLOCKS
    while high - low > 1:
        middle = (low + high) // 2
        best = decide(two_pods(model, hardware, link, middle, transfers), PULLING).candidates[0]
        assert best.pod.id == "idle"
        assert best.plan.pull in (None, Pull("holder", middle * BLOCK, middle * BLOCK))
        low, high = (low, middle) if best.plan.pull else (middle, high)
    assert high < MOST_BLOCKS
    return high * BLOCK


@pytest.mark.parametrize(("model", "hardware", "t0_ms", "gb_per_s", "tokens"), CASES)
def test_a_prefix_is_pulled_from_the_length_in_the_table(
    model: str, hardware: str, t0_ms: float, gb_per_s: float, tokens: float
) -> None:
    """Within 10 %, or the block that the table's small numbers are rounded to."""
    assert crossover_tokens(model, hardware, t0_ms, gb_per_s) == pytest.approx(tokens, rel=0.1, abs=BLOCK)


@pytest.mark.parametrize("transfers", [1, 2, 4])
@pytest.mark.parametrize(("model", "hardware", "t0_ms", "gb_per_s", "tokens"), CASES[3::6])
def test_concurrent_transfers_move_the_crossover_as_in_the_formula(
    model: str, hardware: str, t0_ms: float, gb_per_s: float, tokens: float, transfers: int
) -> None:
    """saved(p) = c1 p + c2 p^2 exceeds t0 + kappa p (1 + k) / B at the block that decides, and not a block before."""
    speed, kv_bytes = facts_of(model, hardware)
    found = crossover_tokens(model, hardware, t0_ms, gb_per_s, transfers)

    def gained_ms(held_tokens: int) -> float:
        return speed.compute_ms(0, held_tokens) - t0_ms - kv_bytes * held_tokens * (1 + transfers) / (gb_per_s * 1e6)

    assert gained_ms(found - BLOCK) <= 0 < gained_ms(found)
    assert found > tokens
