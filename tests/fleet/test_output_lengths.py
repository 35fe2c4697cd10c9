"""How long answers of a model are is learnt from finished ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.output_lengths import MAX_ANSWER_TOKENS, MAX_MEANS, OutputLengths
from router.types import PRIOR_OUTPUT_TOKENS, Endpoint
from tests.kit import scenes


def expected(
    lengths: OutputLengths, model: str = "m", adapter: str = "", limit: int | None = None, tenant: str = ""
) -> int:
    request = scenes.request(model=model, adapter=adapter, body=b"", max_output_tokens=limit)
    return lengths.expected_tokens(request, tenant)


@given(limit=st.none() | st.integers(min_value=PRIOR_OUTPUT_TOKENS))
def test_a_generous_limit_says_nothing_about_the_length(limit: int | None) -> None:
    """Most clients allow thousands of tokens more than they get."""
    assert expected(OutputLengths(), limit=limit) == PRIOR_OUTPUT_TOKENS


def test_a_tight_limit_is_the_expected_length() -> None:
    """A classifier asks for one token."""
    assert expected(OutputLengths(), limit=1) == 1


def test_a_model_that_reasons_is_expected_to_answer_at_length() -> None:
    """Its adapters and other models are learnt for themselves."""
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.answered("m", 4000)
        lengths.answered("adapter", 40)
    assert expected(lengths) == pytest.approx(4000, rel=0.05)
    assert expected(lengths, adapter="adapter") == pytest.approx(40, rel=0.05)
    assert expected(lengths, model="other") == PRIOR_OUTPUT_TOKENS


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE])
def test_nothing_is_expected_where_nothing_is_generated(endpoint: Endpoint) -> None:
    request = scenes.request(endpoint=endpoint, body=b"")
    assert OutputLengths().expected_tokens(request) == 0


def test_the_answers_of_a_tenant_say_nothing_about_those_of_another() -> None:
    """Else a tenant with long answers would use up the quotas of the others. A new one has the mean of all."""
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.answered("m", 40, "brief")
        lengths.answered("m", 4000, "verbose")
    assert expected(lengths, tenant="brief") == pytest.approx(40, abs=4)
    assert expected(lengths, tenant="verbose") == pytest.approx(4000, rel=0.05)
    assert expected(lengths, tenant="new") == expected(lengths) == pytest.approx(2020, rel=0.1)
    lengths.answered("m", 2000, "new")
    assert expected(lengths, tenant="new") == pytest.approx(2020, rel=0.1)


def test_one_long_answer_changes_little() -> None:
    """The first ones, too."""
    lengths = OutputLengths()
    lengths.answered("m", 10_000)
    assert expected(lengths) < 5 * PRIOR_OUTPUT_TOKENS


def test_old_answers_are_forgotten() -> None:
    """After a change of the model behind its name."""
    lengths = OutputLengths()
    for tokens in (100, 2000):
        for _ in range(1000):
            lengths.answered("m", tokens)
    assert expected(lengths) == pytest.approx(2000, rel=0.02)


@given(st.lists(st.integers(0, 10**30), max_size=50))
def test_what_pods_report_is_bounded(answers: list[int]) -> None:
    lengths = OutputLengths()
    for tokens in answers:
        lengths.answered("m", tokens)
    assert 0 <= expected(lengths) <= MAX_ANSWER_TOKENS


def test_models_without_end_take_no_memory() -> None:
    """The first ones stay known."""
    lengths = OutputLengths()
    for number in range(MAX_MEANS + 9):
        lengths.answered(f"m{number}", 9_000)
    assert expected(lengths, model="m0") > PRIOR_OUTPUT_TOKENS
    assert expected(lengths, model=f"m{MAX_MEANS + 8}") == PRIOR_OUTPUT_TOKENS
