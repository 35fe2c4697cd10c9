"""Fleets of equal simulated pods, prompts, sessions and small traffic, in virtual time."""

from __future__ import annotations

from dataclasses import replace

from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.scenario import DIALECT, SimulatedFleet, SimulatedPod
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from loadtest.simulator.virtual_pod import VirtualPodConfig
from router.config.load import shipped
from router.config.models import load_priors
from router.types import Link, Links, PodSpeed, PrefixTrust, Role
from tests.kit.scenes import make_pod

SPEED = PodSpeed(2.0, 0.1, 1e-6, 8.0, 0.02, 1e-5)
"""1,000 prompt tokens take 103 ms, a decode step 8 ms."""
BLOCK = 16
LINK = Link(1.0, 10e6)
KV_BYTES = 1000
"""Bytes per token."""
DECODING = replace(SPEED, c1_ms_per_token=5.0)
"""So slow at prefill that no policy computes a prompt there."""


def speed_of(model: str, hardware: str) -> PodSpeed:
    """The shipped coefficients."""
    return load_priors(shipped("config") / "models")[model].hardware[hardware].speed()


def equal_pods(
    number: int, true: VirtualPodConfig, *, link: Link | None = None, kv_bytes_per_token: int = 327_680
) -> SimulatedFleet:
    """A fleet of equal pods, with coefficients that the router knows exactly."""
    known = [
        make_pod(
            f"pod-{at:03}",
            speed=true.speed,
            models=("m",),
            block_size_tokens=true.engine_block_tokens,
            kv_bytes_per_token=kv_bytes_per_token,
            handoff=DIALECT,
            pulls=DIALECT,
            trust=PrefixTrust.TRUSTED,
        )
        for at in range(number)
    ]
    pods = tuple(SimulatedPod(pod, true) for pod in known)
    return SimulatedFleet(pods, link, Links(elsewhere=link, cpu=Link(0.0, pods[0].pcie_bytes_per_ms)))


def small_pod(kv_tokens: int = 100_000, cpu_kv_tokens: int = 0, max_num_seqs: int = 256) -> VirtualPodConfig:
    """A pod of `SPEED`."""
    return VirtualPodConfig(speed=SPEED, kv_tokens=kv_tokens, cpu_kv_tokens=cpu_kv_tokens, max_num_seqs=max_num_seqs)


def small_mix(duration_s: float = 20.0) -> TrafficMix:
    """About 100 requests in 20 s: chats with two system prompts, and unique prompts."""
    chat = Kind(
        share=2.0, prefixes=2, prefix_tokens=(400, 900), turns=(1, 3), output_tokens=(1, 60), think_s=(0.1, 2.0)
    )
    return TrafficMix(
        sessions_per_s=3.0,
        duration_s=duration_s,
        kinds={"chat": chat, "one_off": Kind(first_tokens=(50, 3000), output_tokens=(1, 40))},
        block_size_tokens=16,
    )


def prior(model: str, hardware: str) -> tuple[PodSpeed, int]:
    """`SPEED` and 1,000 bytes per token, for any model."""
    return SPEED, 1000


def prompt(name: int, tokens: int, output_tokens: int = 1) -> TrafficRequest:
    """Prompts with one name share the longest possible prefix."""
    blocks = range(name << 20, (name << 20) + tokens // BLOCK)
    return TrafficRequest(tokens, output_tokens, blocks, len(blocks))


def at(start_s: float, *requests: TrafficRequest) -> Session:
    return Session(start_s, requests)


def traffic(*sessions: Session) -> Traffic:
    return Traffic(BLOCK, sessions)


def fleet(number: int, true: VirtualPodConfig | None = None, link: Link | None = None) -> SimulatedFleet:
    return equal_pods(number, true or small_pod(), link=link, kv_bytes_per_token=KV_BYTES)


def apart(prefill: int, decode: int, link: Link | None = LINK, decoding: PodSpeed = DECODING) -> SimulatedFleet:
    """Pods that only prefill, then pods that only decode, at that speed."""
    whole, slow = fleet(prefill + decode, link=link), replace(small_pod(), speed=decoding)
    pods = [replace(pod, known=replace(pod.known, role=Role.PREFILL)) for pod in whole.pods[:prefill]]
    for pod in whole.pods[prefill:]:
        pods.append(SimulatedPod(replace(pod.known, role=Role.DECODE, speed=decoding), slow))
    return replace(whole, pods=tuple(pods))
