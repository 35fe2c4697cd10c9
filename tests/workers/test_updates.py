"""Which recent dispatches a snapshot contains."""

from __future__ import annotations

from router.workers.updates import MAX_RECENT_BYTES, Dispatch, RecentDispatches


def sent(pod: str, blocks_bytes: int = 8, ttl_s: float = 30.0) -> Dispatch:
    return Dispatch(pod, b"x" * blocks_bytes, ttl_s, None)


def test_expired_dispatches_are_left_out() -> None:
    """Each has its own TTL."""
    recent = RecentDispatches()
    recent.add(sent("a", ttl_s=10.0), 0.0)
    recent.add(sent("b", ttl_s=100.0), 1.0)
    assert [one.pod for one in recent.unexpired(9.0)] == ["a", "b"]
    assert [one.pod for one in recent.unexpired(10.0)] == ["b"]


def test_dispatches_to_a_pod_with_a_lost_cache_are_left_out() -> None:
    """Dispatches to other pods stay."""
    recent = RecentDispatches()
    for pod in "aba":
        recent.add(sent(pod), 0.0)
    recent.forget("a")
    assert [one.pod for one in recent.unexpired(1.0)] == ["b"]


def test_the_oldest_dispatches_are_evicted_above_the_limit() -> None:
    """By bytes, also after some were removed."""
    recent = RecentDispatches()
    half = MAX_RECENT_BYTES // 2
    recent.add(sent("old", half), 0.0)
    recent.add(sent("gone", half), 0.0)
    recent.forget("gone")
    recent.add(sent("new", half), 0.0)
    assert [one.pod for one in recent.unexpired(1.0)] == ["old", "new"]
    recent.add(sent("newer"), 0.0)
    assert [one.pod for one in recent.unexpired(1.0)] == ["new", "newer"]
