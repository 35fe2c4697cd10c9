"""Random histories through vLLM's own KV cache manager: do simulated pods, mock engines and the index agree with it?

    python -m tests.live.manager_histories --count 1000 [--seed 0]

    python -m tests.live.manager_histories --drafters tests/index/drafters.json

The second one records what it answers with EAGLE and with MTP. Needs vLLM as `install.sh` installs it, no GPU and no
model. Requests run one after the other; they share starts, are cut, sent again and continued, and some pools are too
small for them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.engine_model.pod import SimPod, SimPodConfig, SimRequest
from loadtest.simulator.layered_pod import new_pod
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.virtual_pod import VirtualPodConfig
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.hit_probe import CacheHabits
from router.stores.prefix_store import LocalStore
from router.types import AttentionKind, Generation, LayerType, PromptPrefix
from tests.index.decoding import decode_batch
from tests.kit.layered_pool import layered
from tests.kit.scenes import LLAMA_8B, make_pod
from tests.live.engines import HOME

BLOCK = 16
INTERVAL_S, TTL_S = 0.1, 30.0
FULL, STATE = LayerType(AttentionKind.FULL, BLOCK), LayerType(AttentionKind.STATE, BLOCK)


def window(tokens: int, block: int = BLOCK) -> LayerType:
    return LayerType(AttentionKind.WINDOW, block, tokens)


class Family(NamedTuple):
    """`drafter_group`: the one with the layers of MTP; None: with EAGLE, no group is marked."""

    groups: Sequence[LayerType]
    drops: bool = False
    drafter_group: int | None = None

    @property
    def habits(self) -> CacheHabits:
        """What a test of hits shows. A rule has full attention first."""
        types = [*dict.fromkeys(sorted(self.groups, key=lambda one: one.kind is not AttentionKind.FULL))]
        layer = -1 if self.drafter_group is None else types.index(self.groups[self.drafter_group])
        return CacheHabits(drops_block=self.drops, drafter_layer=layer)

    @property
    def is_simulated(self) -> bool:
        """Simulated pods have no drafters, and blocks of one size."""
        return not self.drops and {one.block_tokens for one in self.groups} == {BLOCK}


WIDE = LayerType(AttentionKind.FULL, 2 * BLOCK)
FAMILIES = {
    "full": Family((FULL,)),
    "gpt-oss": Family((window(128), FULL)),
    "gemma 3": Family((*[window(64)] * 3, FULL)),
    "full first": Family((FULL, window(40))),
    "two windows": Family((window(48), FULL, window(160))),
    "qwen3-next": Family((STATE, STATE, STATE, FULL)),
    "full, drafter": Family((FULL,), drops=True),
    "gpt-oss, drafter": Family((window(128), FULL), drops=True),
    "unequal blocks": Family((*[window(64)] * 2, WIDE)),
    "unequal blocks, drafter": Family((window(128), WIDE), drops=True),
    "full, MTP": Family((FULL,), drops=True, drafter_group=0),
    "qwen3-next, MTP": Family((STATE, STATE, STATE, FULL), drops=True, drafter_group=3),
    "full first, drafter": Family((FULL, *[window(64)] * 2), drops=True),
    "full first, MTP": Family((FULL, *[window(64)] * 2), drops=True, drafter_group=2),
    "gpt-oss, MTP": Family((window(128), FULL), drops=True, drafter_group=1),
    "two windows, MTP": Family((window(48), FULL, window(160)), drops=True, drafter_group=2),
    "two windows, MTP in full": Family((window(48), FULL, window(160)), drops=True, drafter_group=1),
    "unequal blocks, MTP": Family((*[window(64)] * 2, WIDE), drops=True, drafter_group=2),
    "qwen3-next, drafter": Family((STATE, STATE, STATE, FULL), drops=True),
}


class History(NamedTuple):
    family: str
    blocks: int
    requests: list[tuple[list[int], list[int]]]


def histories(count: int, seed: int) -> Iterator[History]:
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        family = [*FAMILIES][number % len(FAMILIES)]
        groups = len(FAMILIES[family].groups)
        yield History(family, rng.choice([80, 110, 150]) * groups if rng.random() < 0.6 else 20_000, [*sent(rng)])


def sent(rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts of at most 700 tokens. The first one makes the pod announce all of its groups, as the self-test does."""
    yield [rng.randrange(1000) for _ in range(5 * BLOCK)], [0]
    starts = [[rng.randrange(1000) for _ in range(rng.randrange(20, 400))] for _ in range(2)]
    before = [starts[0]]
    for _ in range(rng.randrange(6, 25)):
        more = [rng.randrange(1000) for _ in range(rng.randrange(1, 200))]
        known = rng.choice(before)
        known = rng.choice([known, known[: rng.randrange(1, len(known) + 1)], rng.choice(starts)])
        prompt = (known if rng.random() < 0.2 else known + more)[:700]
        output = [rng.randrange(1000) for _ in range(rng.randrange(1, 50))]
        before.append(prompt + output)
        yield prompt, output


Answers = list[tuple[int, list[str]]]
DRAFTERS = {
    "full": (FULL,),
    "states and full": (STATE, FULL),
    "full and windows": (FULL, window(64)),
    "windows and full": (window(64), FULL),
}
"""With MTP, the last one has its layers."""


def one_history(family: str) -> History:
    """A prompt, the same again, its next turn, two others that share its start, its beginning, and one that ends with a
    block, which is sent again and continued."""
    rng = random.Random(7)
    first, *more = ([rng.randrange(1000) for _ in range(200)] for _ in range(6))
    aligned = more[3][:96]
    prompts = [first[:190], first[:190], first + more[0], first[:100] + more[1], first[:100] + more[2], first[:150]]
    prompts += [aligned, aligned, aligned + more[4]]
    return History(family, 20_000, [(prompt, [1]) for prompt in prompts])


def record_drafters(target: Path) -> None:
    for layers, groups in DRAFTERS.items():
        FAMILIES[f"{layers}, EAGLE"] = Family(groups, drops=True)
        FAMILIES[f"{layers}, MTP"] = Family(groups, drops=True, drafter_group=len(groups) - 1)
    asked = [one_history(f"{layers}, {method}") for layers in DRAFTERS for method in ("EAGLE", "MTP")]
    recorded = {
        history.family: [
            {"prompt": prompt, "cached_tokens": hit, "batches": batches}
            for (prompt, _), (hit, batches) in zip(history.requests, answers, strict=True)
        ]
        for history, answers in zip(asked, by_the_engine(asked), strict=True)
    }
    target.write_text(json.dumps(recorded) + "\n")


def by_the_engine(asked: Sequence[History]) -> Iterator[Answers]:
    command = [str(HOME / "vllm/bin/python"), str(Path(__file__).with_name("engine_manager.py"))]
    lines = []
    for one in asked:
        family = FAMILIES[one.family]
        groups = [(group.kind, group.block_tokens, group.span_tokens) for group in family.groups]
        fields = {
            "groups": groups,
            "drops": family.drops,
            "drafter_group": family.drafter_group,
            "blocks": one.blocks,
            "requests": one.requests,
        }
        lines.append(json.dumps(fields))
    done = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("answer "):
            yield json.loads(line.removeprefix("answer "))


def by_events(history: History, answers: Answers) -> list[int]:
    """What a router expects of each request, which has sent those before, in quick succession, and has their events."""
    generation, store = Generation(model="m", block_size_tokens=BLOCK), LocalStore()
    store.add_holder(make_pod("pod"), generation)
    store.learn("pod", FAMILIES[history.family].habits)
    found = []
    for at, ((prompt, _), (_, batches)) in enumerate(zip(history.requests, answers, strict=True)):
        tokens = token_array(prompt)
        prefix = PromptPrefix(generation, tokens, hash_blocks(tokens, BLOCK, generation_seed(generation)))
        hit = store.match(prefix, at * INTERVAL_S).held_blocks("pod")
        found.append(BLOCK * min(hit, (len(prompt) - 1) // BLOCK))
        sent = store.predict("pod", prefix, ttl_s=TTL_S, capacity_blocks=None)
        if at % 2:  # its first token comes before its events
            store.confirm(sent, at * INTERVAL_S)
        for batch in batches:
            store.apply("pod", decode_batch(bytes.fromhex(batch)))
        store.confirm(sent, at * INTERVAL_S)
    return found


def by_the_mock_engine(history: History) -> list[int]:
    family, found = FAMILIES[history.family], list[int]()
    pool = layered(family.groups, family.habits)
    pod = SimPod(SimPodConfig(speed=LLAMA_8B, num_blocks=history.blocks, new_pool=pool))
    for prompt, output in history.requests:
        pod.submit(SimRequest(id="one", prompt=token_array(prompt), output=output))
        while pod.start_step() is not None:
            found += pod.end_step().started.values()
    return found


def by_the_simulated_pod(history: History) -> list[int]:
    groups = FAMILIES[history.family].groups
    config = VirtualPodConfig(
        speed=LLAMA_8B, kv_tokens=history.blocks * BLOCK, engine_block_tokens=BLOCK, kv_groups=tuple(groups)
    )
    pod, now_ms, found = new_pod(config, BLOCK), 0.0, []
    seed = generation_seed(Generation(model="m", block_size_tokens=BLOCK))
    for prompt, output in history.requests:
        hashes = hash_blocks(token_array(prompt + output[:-1]), BLOCK, seed)
        job = Job(None, TrafficRequest(len(prompt), len(output), hashes, len(prompt) // BLOCK))
        pod.submit(job, now_ms)
        pod.advance(now_ms)
        while pod.wake_ms < float("inf"):
            now_ms = pod.wake_ms
            pod.advance(now_ms)
        assert job.cached_tokens is not None
        found.append(job.cached_tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafters", type=Path)
    args = parser.parse_args()
    if args.drafters is not None:
        record_drafters(args.drafters)
        return
    asked = [*histories(args.count, args.seed)]
    sums, differs = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for history, answers in zip(asked, by_the_engine(asked), strict=True):
        cached = [hit for hit, _ in answers]
        ways = {"index": by_events(history, answers)}
        if FAMILIES[history.family].is_simulated:
            ways["simulated pod"] = by_the_simulated_pod(history)
        if len({one.block_tokens for one in FAMILIES[history.family].groups}) == 1 and history.blocks > 10_000:
            ways["mock engine"] = by_the_mock_engine(history)
        pool = "never full" if history.blocks > 10_000 else "evicts"
        for way, found in ways.items():
            way = f"{way}, {pool}"
            sums[history.family, way] += len(cached)
            differs[history.family, way] += sum(ours != theirs for ours, theirs in zip(found, cached, strict=True))
    for (family, way), requests in sorted(sums.items()):
        print(f"{family:24} {way:26} {requests:6} requests, {differs[family, way]} differ")
    sys.exit(1 if +differs else 0)


if __name__ == "__main__":
    main()
