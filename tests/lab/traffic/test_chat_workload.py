"""The generated sessions have the requested mix and share what they should."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from loadtest.traffic.chat_workload import (
    MIX,
    ChatSession,
    SessionShape,
    Shared,
    Turn,
    mixed_sessions,
    poisson,
    sessions,
)


def long_run() -> list[ChatSession]:
    return sessions(7, duration_s=100.0, sessions_per_s=4.0)


@given(st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_sessions(seed: int) -> None:
    """Two runs with one seed send the same requests."""
    first = sessions(seed, duration_s=1.0, sessions_per_s=3.0)
    assert first == sessions(seed, duration_s=1.0, sessions_per_s=3.0)
    assert sessions(seed + 1, duration_s=1.0, sessions_per_s=3.0) != first or not first


def test_sessions_arrive_in_order_at_the_requested_rate_with_unique_names() -> None:
    """A Poisson process of rate 4 over 100 s: 400 arrivals within four standard deviations."""
    starts_s = [session.start_s for session in long_run()]
    assert starts_s == sorted(starts_s)
    assert starts_s[0] > 0
    assert starts_s[-1] < 100.0
    assert abs(len(starts_s) - 400) < 80
    assert len({session.id for session in long_run()}) == len(starts_s)


def test_every_kind_has_its_share() -> None:
    """Shares follow MIX, within sampling error."""
    kinds = Counter(session.kind for session in long_run())
    for kind, shape in MIX.items():
        assert abs(kinds[kind] / kinds.total() - shape.share) < 0.08


def test_tenants_and_documents_are_shared_by_zipfs_law() -> None:
    """Few system prompts serve all chats, and the most popular document is used far more than the least popular."""
    by_kind = {kind: Counter(s.system for s in long_run() if s.kind == kind) for kind in MIX}
    assert len(by_kind["chat"]) == 4
    documents = by_kind["rag"].most_common()
    assert 8 <= len(documents) <= 16
    assert documents[0][1] >= 4 * documents[-1][1]
    assert len(by_kind["agent"]) == 1
    assert set(by_kind["one-off"]) == {""}


def test_each_turn_extends_the_previous_one_and_its_answer() -> None:
    """The earlier messages are a prefix of the next prompt, which a cache can reuse."""
    session = ChatSession("s", "chat", 0.0, "Be kind.", (Turn("One?", 8), Turn("Two?", 8)))
    first = session.messages([])
    assert first == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One?"}]
    second = session.messages(["Yes."])
    assert second == [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Two?"}]


def test_a_prompt_without_a_system_message_starts_with_the_user() -> None:
    """One-off prompts share nothing, not even an empty system message."""
    session = next(s for s in long_run() if s.kind == "one-off")
    assert [message["role"] for message in session.messages([])] == ["user"]


def test_whole_conversations_stay_within_eight_thousand_words() -> None:
    """The longest prompt fits into the small caches of the demo."""
    for session in long_run():
        last = session.messages([" answer" * turn.max_tokens for turn in session.turns[:-1]])
        assert 20 <= sum(len(message["content"].split()) for message in last) < 8000


ASK = SessionShape(share=1.0, first_words=(5, 9), answer_tokens=(4, 8))


def systems(shape: SessionShape, count: int = 200) -> list[str]:
    return [session.system for session in mixed_sessions(Random(1), {"ask": shape}, [float(n) for n in range(count)])]


def test_a_session_picks_different_texts_after_the_preface() -> None:
    """Three of five documents, each at most once, in varying order."""
    found = systems(replace(ASK, shared=Shared(texts=5, words=(20, 20), picked=3, preface="Read these.")))
    parts = [system.split("\n\n") for system in found]
    assert {first for first, *_ in parts} == {"Read these."}
    assert all(len(set(texts)) == 3 for _, *texts in parts)
    assert len({text for _, *texts in parts for text in texts}) == 5


def test_all_texts_are_picked_in_one_order() -> None:
    """They form one common prefix, such as the tools of an agent."""
    assert len(set(systems(replace(ASK, shared=Shared(texts=3, words=(20, 20), picked=3))))) == 1


def test_without_skew_all_texts_are_equally_likely() -> None:
    """With exponent 0; with 3 the first text has nearly everything."""
    even = Counter(systems(replace(ASK, shared=Shared(texts=2, words=(9, 9), zipf=0.0))))
    skewed = Counter(systems(replace(ASK, shared=Shared(texts=2, words=(9, 9), zipf=3.0))))
    assert max(even.values()) < 130
    assert max(skewed.values()) > 160


def test_unique_words_come_first() -> None:
    """No two sessions start alike, although all share the text after that."""
    found = systems(replace(ASK, unique_first=True, shared=Shared(texts=1, words=(50, 50))))
    assert len({system[:24] for system in found}) == len(found)
    assert len({system.split("\n\n")[1] for system in found}) == 1


def test_poisson_arrivals_stay_within_the_duration() -> None:
    """Rate 5 over 200 s: 1,000 arrivals within four standard deviations."""
    starts_s = list(poisson(Random(3), 200.0, 5.0))
    assert abs(len(starts_s) - 1000) < 127
    assert starts_s == sorted(starts_s)
    assert 0 < starts_s[0] < starts_s[-1] < 200.0
