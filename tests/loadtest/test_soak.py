"""The soak test finds what is left behind, and its clients leave when they should."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.faults.soak import RequestEnd, Sample, SoakResult, connected, growth, left_behind, results

METRICS = """
warmroute_in_flight_requests 2.0
warmroute_pod_in_flight_requests{pod="pod-0"} 1.0
warmroute_pod_in_flight_requests{pod="pod-1"} 3.0
warmroute_requests_total{endpoint="chat",model="m",result="ok"} 7.0
warmroute_requests_total{endpoint="chat",model="n",result="ok"} 1.0
warmroute_requests_total{endpoint="chat",model="m",result="client_gone"} 4.0
"""
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 3
   3: 0100007F:1F90 0100007F:C351 06 00000000:00000000 00:00000000 00000000     0        0 4
   4: 0100007F:1F90 0100007F:C352 08 00000000:00000000 00:00000000 00000000     0        0 5
"""


def test_memory_counts_from_the_end_of_the_first_tenth() -> None:
    """Caches fill until then; the trend is per request."""
    samples = [Sample(0, 0, 10), Sample(1, 100, 1000), Sample(2, 600, 2000), Sample(3, 1000, 2800)]
    grown = growth(samples, 1000)
    assert grown
    assert (grown.first_bytes, grown.last_bytes) == (1000, 2800)
    assert grown.bytes_per_request == pytest.approx(2.0)
    assert growth(samples[:2], 1000) is None


def test_gauges_and_results_are_summed_over_their_labels() -> None:
    """By name, and by result."""
    assert left_behind(METRICS) == {"warmroute_in_flight_requests": 2, "warmroute_pod_in_flight_requests": 4}
    assert results(METRICS) == {"ok": 8, "client_gone": 4}


def test_connected_clients_are_counted_by_the_routers_port() -> None:
    """Not the listening socket, not the clients' ends, not sockets in TIME_WAIT."""
    assert connected(TCP, 8080) == 2
    assert connected(TCP, 9090) == 0


@pytest.mark.parametrize(
    ("ends", "left", "clean"),
    [
        ({RequestEnd.ANSWERED: 5, RequestEnd.LEFT_MID_STREAM: 1}, 0.0, True),
        ({RequestEnd.ANSWERED: 5, RequestEnd.REFUSED: 1}, 0.0, False),
        ({RequestEnd.ANSWERED: 5, RequestEnd.ROUTER_HUNG_UP: 1}, 0.0, False),
        ({RequestEnd.ANSWERED: 5}, 1.0, False),
    ],
)
def test_a_run_is_clean_if_nothing_failed_and_nothing_is_left(
    ends: dict[RequestEnd, int], left: float, clean: bool
) -> None:
    """Clients that left are not failures."""
    counted = Counter({end.value: count for end, count in ends.items()})
    assert SoakResult(6, counted, left_behind={"gauge": left}).clean is clean
