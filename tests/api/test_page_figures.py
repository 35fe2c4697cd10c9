"""The figures of the operators' page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.frontends.admin.page_figures import BEYOND, Counted, CountedHistory, MetricRows, MetricsGrowth, quantile
from router.observe.declared import of_requests


def metrics(requests: float) -> dict[str, MetricRows]:
    """A tenth of the requests failed, a tenth of the clients left; all first tokens took 5 to 10 ms."""
    no_tokens = [0.0] * (len(of_requests.SECONDS) - 1)
    return {
        of_requests.CLASS_REQUESTS.name: [
            (("chat", "ok"), [0.8 * requests]),
            (("chat", "client_gone"), [0.1 * requests]),
            (("rag", "pod_error"), [0.1 * requests]),
        ],
        of_requests.REQUESTS.name: [
            (("ok",), [0.8 * requests]),
            (("client_gone",), [0.1 * requests]),
            (("pod_error",), [0.1 * requests]),
            (("no_ready_pod",), [0.2 * requests]),
            (("unknown_url",), [requests]),
        ],
        of_requests.TTFT_S.name: [(("chat",), [0.0, requests, *no_tokens, 1.0])],
        of_requests.PROMPT_TOKENS.name: [((), [1000.0 * requests])],
        of_requests.CAPTURED_TOKENS.name: [((), [500.0 * requests])],
    }


def test_figures_are_those_between_two_snapshots() -> None:
    found = MetricsGrowth(metrics(110.0), metrics(100.0)).figures()
    assert round(found["requests"]) == 12, "with those that reached no class; unknown URLs are of no API"
    assert {name: round(count) for name, count in found["failed"].items()} == {"no_ready_pod": 2, "pod_error": 1}
    assert next(iter(found["failed"])) == "no_ready_pod", "the most frequent reason first"
    assert {name: round(one["failures"]) for name, one in found["classes"].items()} == {"chat": 0, "rag": 1}
    assert found["ttft_s"].count == 10 and found["ttft_s"].p50 == 0.0075
    assert found["token_shares"] == {"available": 0.0, "captured": 0.5, "delivered": None}


def test_no_figure_is_invented_without_requests() -> None:
    empty = MetricsGrowth(metrics(0.0), {}).figures()
    assert empty["ttft_s"].p50 is None and set(empty["token_shares"].values()) == {None}


def test_the_window_begins_at_the_first_snapshot_of_the_last_minute() -> None:
    history = CountedHistory()
    for at_s in (0.0, 30.0, 55.0, 70.0):
        history.add(Counted(at_s))
    assert (history.since(60.0).at_s, history.since(15.0).at_s) == (30.0, 55.0)


@given(st.lists(st.integers(0, 100), min_size=3, max_size=3), st.floats(0, 1))
def test_a_quantile_is_within_its_bucket(counts: list[int], share: float) -> None:
    found = quantile((1.0, 2.0), counts, share)
    assert (found is None) == (not share * sum(counts))
    assert found is None or found == BEYOND or 0 <= found <= 2
