"""Looking up metrics in exposition text."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from router.engines.prometheus import METRICS, LoadGauges, read_load, samples
from router.guards import OutOfBounds, OutOfRange
from router.types import PodLoad

GAUGES = LoadGauges(running=("run", "old_run"), waiting=("wait",), kv_usage=("usage",), rank_label="rank")


def test_a_name_matches_whole_and_at_the_start_of_a_line() -> None:
    """Longer names, HELP lines and label values are not samples."""
    text = b'# HELP run how many\nrun_total 1\nre_run 2\nother{x="\nrun 7"} 3\nrun 4\nrun{a="b"} 5 1700000000\n'
    assert [sample.value for sample in samples(text, "run")] == [4.0, 5.0]


def test_the_last_line_needs_no_end() -> None:
    """Nor does the first need a beginning."""
    assert [sample.value for sample in samples(b"run 4", "run")] == [4.0]


def test_the_samples_of_a_metric_are_consecutive() -> None:
    """The format requires it, so the rest of a long page is not searched."""
    text = b"# TYPE run gauge\nrun 1\nrun 2\n# TYPE wait gauge\nwait 3\nrun 4\n"
    assert [sample.value for sample in samples(text, "run")] == [1.0, 2.0]


@pytest.mark.parametrize(
    "line", [b"run NaN", b"run +Inf", b"run four", b"run", b"run ", b'run{a="b" 4', b'run{a="b\n} 4']
)
def test_a_malformed_line_is_skipped(line: bytes) -> None:
    """The lines around it are read."""
    values = [sample.value for sample in samples(b"run 1\n" + line + b"\nrun 2\n", "run")]
    assert values == [1.0, 2.0]


@given(labels=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(max_size=20), max_size=3))
@example(labels={"a": 'x"} 9\n\\"', "b": "\\n{}"})
def test_output_of_prometheus_is_read_back(labels: dict[str, str]) -> None:
    """Names, values and escaped label values of the reference implementation."""
    labels = {name: value.encode("utf-8", "ignore").decode().replace("\r", "") for name, value in labels.items()}
    registry = CollectorRegistry()
    gauge = Gauge("vllm:run", "help", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(2.5)
    assert [(s.labels, s.value) for s in samples(generate_latest(registry), "vllm:run")] == [(labels, 2.5)]


@given(noise=st.binary(max_size=60))
@example(noise=b"1000001")
def test_garbage_is_nothing_or_a_figure_out_of_range(noise: bytes) -> None:
    """Also around a searched name."""
    for text in (noise, b"run" + noise, b"run{" + noise, b"\nrun " + noise):
        with suppress(OutOfRange):
            read_load(text, GAUGES, None, 0.0)


@pytest.mark.parametrize(
    "line", [b"run 1e308", b"run -1", b"run 3\nwait 1e7", b"run 3\nusage 2", b"run 3\nusage -1e-9"]
)
def test_a_figure_that_cannot_be_true_makes_the_load_unknown(line: bytes) -> None:
    """It would be an operand of every price."""
    with pytest.raises(OutOfRange, match="expected 0 to"):
        read_load(line + b"\n", GAUGES, None, 0.0)


def test_usage_just_above_one_is_one() -> None:
    load = read_load(b"run 3\nusage 1.01\n", GAUGES, None, 0.0)
    assert load is not None and load.kv_usage == 1.0


@pytest.mark.parametrize(
    "line",
    [
        b"{%b} 1" % (b"a=b," * 15_000),
        b"{%b} 1" % (b"a" * 60_000),
        b'{a="%b} 1' % (b"\\a" * 30_000),
        b"{%b} 1" % (b"," * 60_000),
    ],
    ids=["no quotes", "one name", "an open quote", "commas"],
)
def test_a_long_line_with_broken_labels_is_skipped(line: bytes) -> None:
    """In linear time (`tests/bench/cpu_bounds.py`)."""
    assert read_load(b"run" + line + b"\nrun 4\n", GAUGES, None, 0.0) == PodLoad(4)


@pytest.mark.parametrize(
    "text",
    [
        b"run 1\n" * 100_000,
        b"runs\n" * 100_000,
        (b"run{" + b'a="",' * 600 + b"} 1\n") * 500,
        b"#" * METRICS.max_bytes + b"\nrun 1\n",
    ],
    ids=["samples", "others", "labels", "bytes"],
)
def test_a_page_is_read_up_to_its_bound(text: bytes) -> None:
    """No page that a real engine has comes near."""
    with pytest.raises(OutOfBounds, match="page of metrics"):
        read_load(text, GAUGES, None, 0.0)


def test_a_page_of_64_ranks_is_within_the_bound() -> None:
    """With as many labels as vLLM gives its cache's configuration."""
    labels = ",".join(f'name_of_a_label_{number}="a value"' for number in range(37))
    text = "\n".join(f'run{{rank="{rank}",{labels}}} 1' for rank in range(64)).encode()
    assert read_load(text, GAUGES, None, 0.0) == PodLoad(64)


def test_ranks_are_summed_and_their_usage_averaged() -> None:
    """Two data-parallel ranks are one pod with twice the cache."""
    text = b'run{rank="0"} 3\nrun{rank="1"} 4\nwait{rank="0"} 1\nwait{rank="1"} 0\n'
    text += b'usage{rank="0"} 0.25\nusage{rank="1"} 0.75\n'
    assert read_load(text, GAUGES, None, 9.0) == PodLoad(7, 1, 0.5, 9.0)
    assert read_load(text, GAUGES, 1, 9.0) == PodLoad(4, 0, 0.75, 9.0)
    assert read_load(text, GAUGES, 2, 9.0) is None


def test_processes_of_one_rank_count_once() -> None:
    """Tensor-parallel ranks export the same requests."""
    text = b'run{rank="0",tp="0"} 3\nrun{rank="0",tp="1"} 3\n'
    assert read_load(text, GAUGES, None, 0.0) == PodLoad(3, 0, 0.0, 0.0)


def test_a_sample_without_a_rank_belongs_to_the_wanted_rank() -> None:
    """Old releases have no label."""
    assert read_load(b"run 3\n", GAUGES, 5, 0.0) == PodLoad(3, 0, 0.0, 0.0)


def test_old_names_are_read_where_the_new_ones_are_missing() -> None:
    """The first present name is read."""
    assert read_load(b"old_run 3\n", GAUGES, None, 0.0) == PodLoad(3)
    assert read_load(b"old_run 3\nrun 2\n", GAUGES, None, 0.0) == PodLoad(2)


def test_metrics_without_load_are_none() -> None:
    """Zeros would attract traffic."""
    assert read_load(b"wait 3\nusage 0.5\n", GAUGES, None, 0.0) is None
