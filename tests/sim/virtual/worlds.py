"""Prompts, sessions and small fleets for a world."""

from __future__ import annotations

from dataclasses import replace

from loadtest.simulator.scenario import SimulatedFleet, SimulatedPod
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from loadtest.simulator.virtual_pod import VirtualPodConfig
from router.types import Link, PodSpeed, Role
from tests.sim.virtual.conftest import SPEED, equal_pods, small_pod

BLOCK = 16
LINK = Link(1.0, 10e6)
KV_BYTES = 1000
"""Bytes per token."""
DECODING = replace(SPEED, c1_ms_per_token=5.0)
"""So slow at prefill that no policy computes a prompt there."""


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
