"""Is the mix the one that was asked for, and does it share what it should?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.chat_workload import MIX, ChatSession, SessionMix, SessionShape, Shared, Turn, poisson, sessions


def long_run() -> list[ChatSession]:
    return sessions(7, duration_s=100.0, sessions_per_s=4.0)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_sessions(seed: int) -> None:
    """Two drives with one seed ask the same."""
    first = sessions(seed, duration_s=1.0, sessions_per_s=3.0)
    assert first == sessions(seed, duration_s=1.0, sessions_per_s=3.0)
    assert sessions(seed + 1, duration_s=1.0, sessions_per_s=3.0) != first or not first


def test_sessions_arrive_in_order_at_the_asked_rate_and_with_names_of_their_own() -> None:
    """A Poisson process of rate 4 over 100 s: 400 arrivals, give or take four deviations."""
    starts_s = [session.start_s for session in long_run()]
    assert starts_s == sorted(starts_s)
    assert starts_s[0] > 0
    assert starts_s[-1] < 100.0
    assert abs(len(starts_s) - 400) < 80
    assert len({session.id for session in long_run()}) == len(starts_s)


def test_every_kind_has_its_share() -> None:
    """The mix is what MIX says, within sampling error."""
    kinds = Counter(session.kind for session in long_run())
    for kind, shape in MIX.items():
        assert abs(kinds[kind] / kinds.total() - shape.share) < 0.08


def test_tenants_and_documents_are_shared_and_the_first_most() -> None:
    """Few system prompts carry all chats, and by Zipf's law the most popular document far more than the least."""
    by_kind = {kind: Counter(s.system for s in long_run() if s.kind == kind) for kind in MIX}
    assert len(by_kind["chat"]) == 4
    documents = by_kind["rag"].most_common()
    assert 8 <= len(documents) <= 16
    assert documents[0][1] >= 4 * documents[-1][1]
    assert len(by_kind["agent"]) == 1
    assert set(by_kind["one-off"]) == {""}


def test_each_turn_repeats_the_last_one_with_its_answer_and_adds_a_question() -> None:
    """What was sent and answered is a prefix of what is sent next: that is what caches live from."""
    session = ChatSession("s", "chat", 0.0, "Be kind.", (Turn("One?", 8), Turn("Two?", 8)))
    first = session.messages([])
    assert first == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One?"}]
    second = session.messages(["Yes."])
    assert second == [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Two?"}]


def test_a_prompt_without_system_begins_with_the_user() -> None:
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
    return [
        session.system for session in SessionMix(Random(1), {"ask": shape}).sessions([float(n) for n in range(count)])
    ]


def test_a_session_picks_different_texts_behind_the_preface() -> None:
    """Three of five documents, never one of them twice, and not always in one order."""
    found = systems(replace(ASK, shared=Shared(texts=5, words=(20, 20), picked=3, preface="Read these.")))
    parts = [system.split("\n\n") for system in found]
    assert {first for first, *_ in parts} == {"Read these."}
    assert all(len(set(texts)) == 3 for _, *texts in parts)
    assert len({text for _, *texts in parts for text in texts}) == 5


def test_where_every_text_is_picked_they_stand_in_one_order() -> None:
    """That is one prefix for all, such as the tools of an agent."""
    assert len(set(systems(replace(ASK, shared=Shared(texts=3, words=(20, 20), picked=3))))) == 1


def test_without_skew_all_texts_are_drawn_alike() -> None:
    """Exponent 0; with 3 the first text has nearly everything."""
    even = Counter(systems(replace(ASK, shared=Shared(texts=2, words=(9, 9), zipf=0.0))))
    skewed = Counter(systems(replace(ASK, shared=Shared(texts=2, words=(9, 9), zipf=3.0))))
    assert max(even.values()) < 130
    assert max(skewed.values()) > 160


def test_what_is_unique_comes_first_and_spoils_the_rest() -> None:
    """No two sessions begin alike, though all share the text behind."""
    found = systems(replace(ASK, unique_first=True, shared=Shared(texts=1, words=(50, 50))))
    assert len({system[:24] for system in found}) == len(found)
    assert len({system.split("\n\n")[1] for system in found}) == 1


def test_a_poisson_process_never_leaves_its_duration() -> None:
    """Rate 5 over 200 s: a thousand, give or take four deviations."""
    starts_s = list(poisson(Random(3), 200.0, 5.0))
    assert abs(len(starts_s) - 1000) < 127
    assert starts_s == sorted(starts_s)
    assert 0 < starts_s[0] < starts_s[-1] < 200.0
