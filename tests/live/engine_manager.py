"""Drives the KV cache manager of vLLM 0.32 without a model, in the environment of vLLM: see `manager_histories.py`.

Reads lines of JSON, each a history: groups, pool and requests. Answers with the cached tokens of each request and the
event batches that it caused, as hex. Requests run one after the other, as its scheduler would run them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

ENCODER = msgspec.msgpack.Encoder()


def spec_of(kind: str, block: int, span: int) -> KVCacheSpec:
    size = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(**size, sliding_window=span)
    if kind == "state":
        return MambaSpec(block, ((1, 1),), (torch.float32,), mamba_cache_mode="align")
    return FullAttentionSpec(**size)


class Engine:
    def __init__(self, history: dict[str, Any]) -> None:
        specs = [spec_of(*group) for group in history["groups"]]
        sizes = [block for _, block, _ in history["groups"]]
        groups = [
            KVCacheGroupSpec([f"layer {at}"], spec, is_eagle_group=at == history["drafter_group"])
            for at, spec in enumerate(specs)
        ]
        self.drops: bool = history["drops"]
        self.block = math.lcm(*sizes)
        self.states = any(kind == "state" for kind, _, _ in history["groups"])
        self.hasher = get_request_block_hasher(math.gcd(*sizes), sha256_cbor)
        self.manager = KVCacheManager(
            KVCacheConfig(history["blocks"] + 1, [], groups, prefix_cache_retention_interval=0),
            max_model_len=100_000,
            scheduler_block_size=self.block,
            hash_block_size=math.gcd(*sizes),
            use_eagle=self.drops,
            enable_kv_cache_events=True,
        )

    def serve(self, name: str, prompt: list[int], output: list[int]) -> tuple[int, list[str]]:
        """Cached tokens, and the batches. The last token of an answer is never computed."""
        sampling = SamplingParams(max_tokens=len(output))
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        batches: list[str] = []
        for number, tokens in enumerate(self.chunks(request, hit)):
            first = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks} if not number else {}
            self.allocate(request, tokens, **first)
            request.num_computed_tokens += tokens + (0 if number else hit)
            batches += self.batch()
        for token in output[:-1]:
            request.append_output_token_ids(token)
            self.allocate(request, 1)
            request.num_computed_tokens += 1
            batches += self.batch()
        self.manager.free(request)
        return hit, batches + list(self.batch())

    def chunks(self, request: Request, hit: int) -> Iterator[int]:
        """A prompt is computed at once, but for states: these are kept where a step ends."""
        end, start = request.num_prompt_tokens, hit
        last = max((end - (not self.drops)) // self.block - self.drops, 0) * self.block
        stops = [request.shared_prefix_boundary // self.block * self.block, last] if self.states else []
        for stop in sorted({stop for stop in stops if hit < stop < end} | {end}):
            yield stop - start
            start = stop

    def allocate(self, request: Request, tokens: int, **first: Any) -> None:
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, tokens, **first) is None:
            raise RuntimeError(f"no memory for {tokens} tokens of {request.request_id}")

    def batch(self) -> Iterator[str]:
        if events := self.manager.take_events():
            yield ENCODER.encode(KVEventBatch(ts=0.0, events=events)).hex()


def main() -> None:
    init_none_hash(sha256_cbor)
    for line in sys.stdin:
        history = json.loads(line)
        engine = Engine(history)
        answers = [engine.serve(str(at), *one) for at, one in enumerate(history["requests"])]
        print("answer", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
