"""Looking up metrics in exposition text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from router.engines.prometheus import LoadGauges, read_load, samples
from router.types import PodLoad

GAUGES = LoadGauges(running=("run", "old_run"), waiting=("wait",), kv_usage=("usage",), rank_label="rank")


def test_a_name_matches_whole_and_at_the_start_of_a_line() -> None:
    """Neither a longer name, nor a HELP line, nor a label's value is a sample of it."""
    text = b'# HELP run how many\nrun_total 1\nre_run 2\nother{x="\nrun 7"} 3\nrun 4\nrun{a="b"} 5 1700000000\n'
    assert [sample.value for sample in samples(text, "run")] == [4.0, 5.0]


def test_the_last_line_needs_no_end() -> None:
    """And the first no beginning."""
    assert [sample.value for sample in samples(b"run 4", "run")] == [4.0]


def test_the_samples_of_a_metric_stand_together() -> None:
    """So the format has it: the rest of a long page is not searched."""
    text = b"# TYPE run gauge\nrun 1\nrun 2\n# TYPE wait gauge\nwait 3\nrun 4\n"
    assert [sample.value for sample in samples(text, "run")] == [1.0, 2.0]


@pytest.mark.parametrize(
    "line", [b"run NaN", b"run +Inf", b"run four", b"run", b"run ", b'run{a="b" 4', b'run{a="b\n} 4']
)
def test_a_line_that_makes_no_sense_is_skipped(line: bytes) -> None:
    """The ones around it are read."""
    values = [sample.value for sample in samples(b"run 1\n" + line + b"\nrun 2\n", "run")]
    assert values == [1.0, 2.0]


@settings(max_examples=100)
@given(labels=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(max_size=20), max_size=3))
@example(labels={"a": 'x"} 9\n\\"', "b": "\\n{}"})
def test_what_prometheus_writes_is_read_back(labels: dict[str, str]) -> None:
    """Names, values and escaped label values of the reference implementation survive."""
    labels = {name: value.encode("utf-8", "ignore").decode().replace("\r", "") for name, value in labels.items()}
    registry = CollectorRegistry()
    gauge = Gauge("vllm:run", "help", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(2.5)
    assert [(s.labels, s.value) for s in samples(generate_latest(registry), "vllm:run")] == [(labels, 2.5)]


@settings(max_examples=100)
@given(noise=st.binary(max_size=60))
def test_garbage_never_raises(noise: bytes) -> None:
    """Not even around a name that is looked for."""
    for text in (noise, b"run" + noise, b"run{" + noise, b"\nrun " + noise):
        read_load(text, GAUGES, None, 0.0)


def test_values_whose_sum_no_float_holds_are_read() -> None:
    """Each by itself is one."""
    load = read_load(
        b'run{rank="0"} 1e308\nrun{rank="1"} 1e308\nusage{rank="0"} 1e308\nusage{rank="1"} 1e308\n', GAUGES, None, 0.0
    )
    assert load is not None
    assert load.running == 2 * int(1e308)
    assert load.kv_usage == 1e308


def test_ranks_are_summed_and_their_usage_averaged() -> None:
    """Two data-parallel ranks are one pod with twice the cache."""
    text = b'run{rank="0"} 3\nrun{rank="1"} 4\nwait{rank="0"} 1\nwait{rank="1"} 0\n'
    text += b'usage{rank="0"} 0.25\nusage{rank="1"} 0.75\n'
    assert read_load(text, GAUGES, None, 9.0) == PodLoad(7, 1, 0.5, 9.0)
    assert read_load(text, GAUGES, 1, 9.0) == PodLoad(4, 0, 0.75, 9.0)
    assert read_load(text, GAUGES, 2, 9.0) is None


def test_processes_of_one_rank_that_export_the_same_count_once() -> None:
    """Tensor-parallel ranks see the same requests."""
    text = b'run{rank="0",tp="0"} 3\nrun{rank="0",tp="1"} 3\n'
    assert read_load(text, GAUGES, None, 0.0) == PodLoad(3, 0, 0.0, 0.0)


def test_a_sample_without_a_rank_is_of_the_rank_that_was_asked() -> None:
    """Old releases do not label it."""
    assert read_load(b"run 3\n", GAUGES, 5, 0.0) == PodLoad(3, 0, 0.0, 0.0)


def test_old_names_count_where_the_new_ones_are_missing() -> None:
    """The first name that is there is the one that is read."""
    assert read_load(b"old_run 3\n", GAUGES, None, 0.0) == PodLoad(3)
    assert read_load(b"old_run 3\nrun 2\n", GAUGES, None, 0.0) == PodLoad(2)


def test_metrics_that_tell_no_load_are_no_load() -> None:
    """None, and not zeros that would draw traffic."""
    assert read_load(b"wait 3\nusage 0.5\n", GAUGES, None, 0.0) is None
