"""What a policy file can name is there, and is what it says."""

from __future__ import annotations

import pytest

from router.policy.catalog import COSTS, DELAYS, FILTERS, PICKERS
from router.policy.reference import purpose_of
from router.policy.term import Configurable


@pytest.mark.parametrize(
    "kind", [*FILTERS.values(), *COSTS.values(), *PICKERS.values()], ids=lambda kind: kind.__name__
)
def test_every_member_has_a_purpose(kind: type[Configurable]) -> None:
    """A question or a sentence, which reference page and `policy diff` show."""
    assert purpose_of(kind).endswith(("?", "."))


def test_terms_until_the_first_token() -> None:
    """The other terms are effects on other requests."""
    assert {"queue", "prefill", "tier_read", "transfer", "handoff", "kv_wait", "held_kv"} == DELAYS
