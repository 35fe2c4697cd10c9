"""Is what is said of a policy's keys what the code does?"""

from __future__ import annotations

from router.policy.reference import unit_of


def test_a_fields_unit_is_in_its_name_or_in_that_of_its_mapping() -> None:
    """Plain numbers have none."""
    assert [unit_of(key) for key in ("slo.ttft_ms", "match.prompt_tokens.min", "costs.decode.weight")] == [
        "ms",
        "tokens",
        "",
    ]
