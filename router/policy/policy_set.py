"""Which policy decides this request?

One default, and other policies for the requests that they match. The set is an immutable value, replaced as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.policy.match import HeaderPairs, takes_share
from router.policy.plans import prompt_token_count
from router.policy.recording import RecordedScene
from router.policy.spec import Policy
from router.types import InferenceRequest


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All active policies. Each of `others` has a `match`; the first that matches decides."""

    default: Policy
    others: tuple[Policy, ...] = ()
    version: str = field(init=False)
    """Changes when an active policy changes."""

    def __post_init__(self) -> None:
        versions = " ".join(f"{policy.name}@{policy.version}" for policy in self.active)
        object.__setattr__(self, "version", hashlib.sha256(versions.encode()).hexdigest()[:12])

    @property
    def active(self) -> tuple[Policy, ...]:
        """The policies that can decide, in the order in which they are tried."""
        return *self.others, self.default

    def for_request(
        self, request: InferenceRequest, workload: str = "", prompt_tokens: int = 0, headers: HeaderPairs = ()
    ) -> Policy:
        """The policy that decides this request; `workload` is its class. O(policies)."""
        for policy in self.others:
            match = policy.match
            if (
                match is not None
                and match.matches(request, workload, prompt_tokens, headers)
                and takes_share(request, policy.name, policy.percent)
            ):
                return policy
        return self.default

    def for_recorded(self, seen: RecordedScene, decided_by: str) -> Policy:
        """The policy that would decide a recorded scene now. Headers are not recorded: conditions on headers count as
        true for the policy that decided the scene, and as false for the others. O(policies)."""
        scene = seen.scene()
        for policy in self.others:
            match = policy.match
            if (
                match is not None
                and (not match.headers or policy.name == decided_by)
                and match.matches_without_headers(scene.request, seen.workload, prompt_token_count(scene))
                and takes_share(scene.request, policy.name, policy.percent)
            ):
                return policy
        return self.default


def policy_set(default: Policy, policies: Iterable[Policy]) -> PolicySet:
    """The default and the policies with a `match`, ordered by number of conditions (most first), then by share
    (smallest first: a canary comes before the policy it is to replace), then by name."""
    matching = (policy for policy in policies if policy.match is not None and policy.name != default.name)
    return PolicySet(default, tuple(sorted(matching, key=_order)))


def _order(policy: Policy) -> tuple[int, float, str]:
    assert policy.match is not None
    return -policy.match.conditions, policy.percent, policy.name
