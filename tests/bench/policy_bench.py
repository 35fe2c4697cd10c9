"""Cost of a decision, by policy and fleet size.

    python tests/bench/policy_bench.py [--pods 4,16,100,500] [--decisions 200]

Every shipped policy and every peer's formula decides prompts of 8,192 tokens, of which one pod in ten holds a part, in
a fleet with work everywhere. Median wall time of one decision on one core, and that of the first one, which builds
caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from random import Random

from msgspec import structs
from rich.console import Console
from rich.table import Table

from router.policy.decide import decide
from router.policy.spec import Policy
from router.types import InFlight, Link, Links, Pod, PodLoad, PodState, PodStatus, PrefixMatch, Role, Scene
from tests.kit.scenes import POLICIES, pod, prompt_of, request, scene

TOKENS = 8192
LINKS = Links(elsewhere=Link(5.0, 2e7))
"""20 GB/s: pulls and handoffs are worth their price."""


def fleet(pods: int, policy: Policy) -> list[Pod]:
    """Pods for the policy: of two roles if it splits."""
    roles = (Role.PREFILL, Role.DECODE) if policy.splits else (Role.BOTH,)
    facts = {"handoff": "nixl", "pulls": "p2p", "kv_bytes_per_token": 100_000}
    return [pod(f"10.0.{n // 250}.{n % 250}:8000", role=roles[n % len(roles)], **facts) for n in range(pods)]


def scenes(pods: list[Pod], decisions: int) -> Iterator[Scene]:
    """One scene a request. Every tenth has a new snapshot of the fleet: loads were read in between."""
    random, statuses = Random(1), list[PodStatus]()
    seen = scene()
    for number in range(decisions):
        prompt = prompt_of([number % 50] * TOKENS)
        if number % 10 == 0:
            statuses = [PodStatus(each, PodState.READY, PodLoad(running=random.randrange(8))) for each in pods]
            seen = scene(*statuses, links=LINKS)
        holders = random.sample(pods, max(len(pods) // 10, 1))
        yield structs.replace(
            seen,
            prompt=prompt,
            match=PrefixMatch({each.id: (random.randrange(len(prompt.hashes)), 0, 0, 0) for each in holders}),
            inflight={each.id: _work(random.uniform(0, 500)) for each in pods},
            request=request(f"r{number}", session=f"s{number % 50}"),
            turn=number,
        )


def _work(prefill_ms: float) -> InFlight:
    return InFlight(requests=4, prefill_requests=1, prefill_ms=prefill_ms, head_ms=prefill_ms, decode_tokens=9000)


def measure(policy: Policy, pods: int, decisions: int) -> tuple[float, float]:
    """(median, first) microseconds of a decision."""
    times_us: list[float] = []
    for seen in scenes(fleet(pods, policy), decisions):
        began_s = time.perf_counter()
        decide(seen, policy)
        times_us.append((time.perf_counter() - began_s) * 1e6)
    return statistics.median(times_us), times_us[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", default="4,16,100,500")
    parser.add_argument("--decisions", type=int, default=200)
    args = parser.parse_args()
    sizes = [int(size) for size in args.pods.split(",")]
    table = Table("policy", *(f"{size} pods" for size in sizes), title="us a decision: median (first)")
    for name, policy in POLICIES.items():
        row = [measure(policy, size, args.decisions) for size in sizes]
        table.add_row(name, *(f"{median_us:,.0f} ({first_us:,.0f})" for median_us, first_us in row))
    Console().print(table)


if __name__ == "__main__":
    main()
