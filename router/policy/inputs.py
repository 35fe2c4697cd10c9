"""The inputs that several cost terms share, as explanations show them.

One name and one unit for each quantity. This module computes no cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.policy.term import Input, Placement, Transfer
from router.types import Link


def prompt_inputs(at: Placement) -> Iterator[Input]:
    """Length of the prompt, and how much of it needs no compute."""
    yield Input("n", "prompt tokens", at.request.prompt_tokens)
    yield Input("p", "cached tokens", at.cached_tokens)


def compute_inputs(at: Placement) -> Iterator[Input]:
    """Coefficients of the compute time of prompt tokens."""
    yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
    yield Input("c2", "ms/token²", at.pod.speed.c2_ms_per_token2)


def decode_inputs(at: Placement) -> Iterator[Input]:
    """Expected output, and what a decode step there takes for each request and context token."""
    yield Input("expected output", "tokens", at.request.output_tokens)
    yield Input("requests decoding", "requests", at.decoding_requests)
    yield Input("d1", "ms/request", at.pod.speed.d1_ms_per_request)
    yield Input("d2", "ms/token", at.pod.speed.d2_ms_per_context_token)


def kv_inputs(at: Placement) -> Iterator[Input]:
    """How full the KV cache is, and which prompts take more of it first."""
    yield Input("KV capacity", "tokens", at.pod.capacity_tokens or 0)
    yield Input("KV in use", "share", at.load.kv_usage)
    yield Input("prompts before it", "tokens", at.inflight.prefill_tokens)


def link_inputs(name: str, link: Link) -> Iterator[Input]:
    """Fixed time and bandwidth of a link."""
    yield Input(f"{name} t0", "ms", link.t0_ms)
    yield Input(f"{name} B", "GB/s", link.bytes_per_ms / BYTES_PER_MS_PER_GB_PER_S)


def transfer_inputs(name: str, transfer: Transfer, at: Placement) -> Iterator[Input]:
    """What is transferred to this pod, and over which link."""
    yield Input(f"{name} tokens", "tokens", transfer.tokens)
    yield Input("kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token)
    yield from link_inputs(name, transfer.link)
    yield Input(f"{name} concurrent", "transfers", transfer.concurrent)
