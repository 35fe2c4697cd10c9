"""Which policy decides this request?

One default, and others for the requests that they match: the narrowest that matches decides. The set is a value,
built and checked whole and swapped whole. This file never reads a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.policy.match import HeaderPairs, takes_share
from router.policy.plans import prompt_token_count
from router.policy.recording import RecordedScene
from router.policy.spec import Policy
from router.types import InferenceRequest


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All policies that are in force. Of `others`, every one has a `match`, and the first that holds decides."""

    default: Policy
    others: tuple[Policy, ...] = ()
    library: Mapping[str, Policy] = field(default_factory=dict, repr=False)
    """All that were read, by name: what a shadow may name."""
    version: str = field(init=False)
    """Changes whenever what decides changes."""

    def __post_init__(self) -> None:
        said = " ".join(f"{policy.name}@{policy.version}" for policy in self.active)
        object.__setattr__(self, "version", hashlib.sha256(said.encode()).hexdigest()[:12])

    @property
    def active(self) -> tuple[Policy, ...]:
        """Those that can decide, in the order in which they are asked."""
        return *self.others, self.default

    def for_request(
        self, request: InferenceRequest, workload: str = "", prompt_tokens: int = 0, headers: HeaderPairs = ()
    ) -> Policy:
        """Who decides. `workload` is its class. O(policies)."""
        for policy in self.others:
            match = policy.match
            if (
                match is not None
                and match.covers(request, workload, prompt_tokens, headers)
                and takes_share(request, policy.name, policy.percent)
            ):
                return policy
        return self.default

    def for_recorded(self, seen: RecordedScene, decided_by: str) -> Policy:
        """Who would decide it now. Headers are not recorded: conditions on them hold for the policy of the name that
        decided it, and for no other. O(policies)."""
        scene = seen.scene()
        for policy in self.others:
            match = policy.match
            if (
                match is not None
                and (not match.headers or policy.name == decided_by)
                and match.covers_but_headers(scene.request, seen.workload, prompt_token_count(scene))
                and takes_share(scene.request, policy.name, policy.percent)
            ):
                return policy
        return self.default


def policy_set(default: Policy, policies: Iterable[Policy]) -> PolicySet:
    """The default, and of the others those that say what they match: most conditions first, of equal ones the smallest
    share first (a canary before what it is to replace), then by name."""
    library = {policy.name: policy for policy in policies}
    matching = (policy for policy in library.values() if policy.match is not None and policy.name != default.name)
    return PolicySet(default, tuple(sorted(matching, key=_order)), library)


def _order(policy: Policy) -> tuple[int, float, str]:
    assert policy.match is not None
    return -policy.match.conditions, policy.percent, policy.name
