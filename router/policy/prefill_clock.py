"""How long did a pod compute on the prompts sent to it, how long did a transfer take?

What `calibration.py` learns from. Source: docs/cost-model.md#calibration.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import msgspec

from router.policy.fit import Vector

SAME_STEP_S: Final = 0.001
"""First tokens within this interval belong to one step."""
LONGEST_STEP_S: Final = 0.5
"""A step that began longer ago has ended unobserved."""
WINDOW_STARTS: Final = 3
"""Window length for a pod that is never idle, in steps with first tokens."""


class PrefillObservation(msgspec.Struct, frozen=True, gc=False):
    """What one pod computed in `elapsed_ms`: sums over prompts of n - p and n^2 - p^2. `starts` counts steps without
    decoding requests, `steps` those with some; `step_requests` and `step_context_tokens` are sums over the latter."""

    starts: int
    tokens: int
    tokens2: int
    elapsed_ms: float
    steps: float = 0.0
    step_requests: float = 0.0
    step_context_tokens: float = 0.0

    @property
    def features(self) -> Vector:
        """The factors of c0, c1, c2, d0, d1 and d2."""
        return (
            *(float(self.starts), float(self.tokens), float(self.tokens2)),
            *(self.steps, self.step_requests, self.step_context_tokens),
        )

    def corrected(self, expected_cached_tokens: int, cached_tokens: int) -> PrefillObservation:
        """The observation if one prompt had another number of cached tokens than expected."""
        expected, found = expected_cached_tokens, cached_tokens
        more, more2 = expected - found, expected * expected - found * found
        return msgspec.structs.replace(self, tokens=self.tokens + more, tokens2=self.tokens2 + more2)


class ConcurrentDecode(msgspec.Struct, frozen=True, gc=False):
    """The requests that decode on a pod while a prompt is computed, and their total context."""

    requests: int = 0
    context_tokens: int = 0


NO_DECODE: Final = ConcurrentDecode()


@dataclass(frozen=True, slots=True)
class TransferObservation:
    """One transfer of KV; its sender had `concurrent` others."""

    kv_bytes: float
    concurrent: int
    elapsed_ms: float


class PrefillClock:
    """Measures how long one pod computes on the prompts sent to it.

    A window begins when a prompt is sent to a pod without other prompts of ours that wait for their first token, and
    ends when none waits. In between the pod computes without a pause, in any order and chunks: the sums of a window are
    exact, those of a single prompt in a batch are not. The window of a single prompt is its time to first token; if
    other requests decode, it begins with the step that the prompt waits for. If prompts always wait, windows end every
    `WINDOW_STARTS` steps, with an error of at most a part of one step.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, int]] = {}
        """n - p and n^2 - p^2 by request, in sending order."""
        self._begin(0.0)

    def sent(
        self,
        request: Hashable,
        prompt_tokens: int,
        cached_tokens: int,
        now_s: float,
        decoding: ConcurrentDecode = NO_DECODE,
        step_began_s: float = -math.inf,
    ) -> None:
        """A prompt was sent to the pod, with `cached_tokens` of it expected in the cache. The requests `decoding` are
        in a step that began at `step_began_s`; if its begin was not observed, half of it counts as over."""
        n, p = prompt_tokens, cached_tokens
        if not self._waiting:
            seen = decoding.requests > 0 and now_s - step_began_s < LONGEST_STEP_S
            self._begin(step_began_s if seen else now_s)
            if decoding.requests:
                self._add_step(decoding, 1.0 if seen else 0.5)
        self._waiting[request] = (n - p, n * n - p * p)

    def first_token(
        self, request: Hashable, now_s: float, decoding: ConcurrentDecode = NO_DECODE
    ) -> PrefillObservation | None:
        """Its prefill is done; `decoding` are in the step. Returns an observation if a window ends. Idempotent; no
        effect after `gone`."""
        if request not in self._waiting:
            return None
        in_order = next(iter(self._waiting)) == request
        self._count(*self._waiting.pop(request), now_s, decoding)
        if self._waiting and not (in_order and (self._spoilt or self._ends >= WINDOW_STARTS)):
            return None
        observation = self._observation(now_s)
        if self._waiting:  # else the next window begins with the next prompt sent
            self._begin(now_s)
        return observation

    def gone(self, request: Hashable) -> None:
        """The request failed, was cancelled, or its first token is not visible: how much of it was computed is unknown.
        Idempotent; no effect after its first token."""
        if self._waiting.pop(request, None) is not None:
            self._spoilt = True

    def disturbed(self) -> None:
        """The pod computes requests of another origin: discard the current window."""
        self._spoilt = True

    def _begin(self, now_s: float) -> None:
        self._began_s = self._last_s = now_s
        self._ends = self._starts = self._tokens = self._tokens2 = 0
        self._steps = self._step_requests = self._step_context_tokens = 0.0
        self._spoilt = False

    def _count(self, tokens: int, tokens2: int, now_s: float, decoding: ConcurrentDecode) -> None:
        if now_s - self._last_s > SAME_STEP_S:
            self._ends += 1
            if decoding.requests:
                self._add_step(decoding, 1.0)
            else:
                self._starts += 1
        self._tokens += tokens
        self._tokens2 += tokens2
        self._last_s = now_s

    def _add_step(self, decoding: ConcurrentDecode, share: float) -> None:
        self._steps += share
        self._step_requests += share * decoding.requests
        self._step_context_tokens += share * decoding.context_tokens

    def _observation(self, now_s: float) -> PrefillObservation | None:
        if self._spoilt or not self._ends:
            return None
        elapsed_ms = (now_s - self._began_s) * 1000
        return PrefillObservation(
            self._starts, self._tokens, self._tokens2, elapsed_ms,
            self._steps, self._step_requests, self._step_context_tokens,
        )  # fmt: skip
