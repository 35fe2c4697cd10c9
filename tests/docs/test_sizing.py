"""The sizing page: its load, its formula, its values and the chart's example name the same number of routers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from loadtest.simulator.generate import TrafficMix
from router.config.load import load
from tests.helm.charts import EXAMPLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text()
WORDS = ("none", "one", "two", "three", "four", "five", "six")


def numbers(pattern: str) -> list[float]:
    """Those of the only match on the page."""
    [found] = re.findall(pattern, PAGE)
    return [float(one.replace(",", "")) for one in ([found] if isinstance(found, str) else found)]


REQUESTS_PER_S, PROMPT_TOKENS, ANSWER_TOKENS = numbers(
    r"at the peak (\d+) requests a second with ([\d,]+) prompt tokens and (\d+) answer tokens in the mean"
)


def test_the_formula_the_page_and_the_example_of_the_chart_agree_on_the_number_of_routers() -> None:
    requests_per_s, request_ms, requests_cpu = numbers(r"\| (\d+) · ([\d.]+) ms = ([\d.]+) \|")
    tokens_per_s, token_us, tokens_cpu = numbers(r"\| ([\d,]+) · (\d+) µs = ([\d.]+) \|")
    assert (requests_per_s, tokens_per_s) == (REQUESTS_PER_S, REQUESTS_PER_S * ANSWER_TOKENS)
    assert requests_cpu == pytest.approx(requests_per_s * request_ms / 1e3, abs=0.006)
    assert tokens_cpu == pytest.approx(tokens_per_s * token_us / 1e6, abs=0.006)
    one, other, most, idle, result = numbers(r"\(([\d.]+) \+ ([\d.]+)\) / \(([\d.]+) - ([\d.]+)\) = ([\d.]+), so")
    assert (one, other) == (requests_cpu, tokens_cpu)
    assert result == pytest.approx((one + other) / (most - idle), abs=0.06)
    routers = math.ceil(result)
    assert f"so **{WORDS[routers]}**" in PAGE
    assert f"\n{WORDS[routers].capitalize()} routers need" in PAGE
    assert numbers(r"replicaCount: (\d+)\nresources") == [routers]
    example = EXAMPLES["production"].read_text()
    assert re.findall(r"^replicaCount: (\d+)$", example, re.MULTILINE) == [str(routers)]
    assert f"behind {WORDS[routers]} routers" in example
    [lost] = numbers(r"the others are at (\d+) %")
    assert lost == pytest.approx(100 * ((one + other) / (routers - 1) + idle), abs=0.6)


def test_the_simulated_traffic_is_the_load_of_the_page() -> None:
    """For long enough: a session of the mix takes minutes, and until then there are fewer requests."""
    [rate] = numbers(r"sessions_per_s: 8.0/sessions_per_s: (\d+)/")
    [seconds] = numbers(r"duration_s: 1800/duration_s: (\d+)/")
    mix = load(ROOT / "config" / "traffic" / "mixed.yaml", TrafficMix)
    sessions = list(mix.model_copy(update={"duration_s": 900.0}).traffic(seed=0).sessions)
    requests = [request for session in sessions for request in session.requests]
    assert rate * len(requests) / len(sessions) == pytest.approx(REQUESTS_PER_S, rel=0.05)
    assert sum(one.prompt_tokens for one in requests) / len(requests) == pytest.approx(PROMPT_TOKENS, rel=0.05)
    assert sum(one.output_tokens for one in requests) / len(requests) == pytest.approx(ANSWER_TOKENS, rel=0.05)
    longest_s = max(sum(one.think_s for one in session.requests) for session in sessions)
    assert seconds > longest_s
