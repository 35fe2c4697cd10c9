"""Ways to serve a request: on its own, with what lies where, and with KV from a peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Direct, Pull
from router.policy.decide import decide
from router.policy.plans import Planner, expected_cached_tokens, prompt_token_count
from router.policy.recording import record
from router.policy.term import Placement
from router.types import (
    BlocksByTier,
    InFlight,
    Link,
    Links,
    Pod,
    PodLoad,
    PodState,
    PodStatus,
    PrefixMatch,
    PrefixTrust,
    Scene,
)
from tests.kit.scenes import BLOCK, SPEED, holding, links, pod, policy, prompt, ready, scene

LINK = Link(1.0, 1e6)
"""1,000 tokens of 1,000 bytes take 2 ms; to compute them takes 20."""
TOKENS = 1601
BLOCKS = 100
PULLING = policy("queue", "prefill", "transfer")


def peer(name: str, **facts: Any) -> Pod:
    """A pod that can pull from pods of its kind."""
    return pod(name, **({"pulls": "nixl", "kv_bytes_per_token": 1000} | facts))


def asked(*pods: Pod, held: Mapping[str, int], **facts: Any) -> Scene:
    """A prompt of 100 blocks and a token, with the blocks held by pods."""
    match = PrefixMatch({name: (blocks, 0, 0, 0) for name, blocks in held.items()})
    usual: dict[str, Any] = {"prompt": prompt(TOKENS), "match": match, "links": Links(elsewhere=LINK)}
    return scene(*facts.pop("statuses", ready(*pods)), **(usual | facts))


def placed(seen: Scene) -> dict[str, Placement]:
    planner = Planner(seen, prompt_token_count(seen))
    return {at.pod.id: at for at in planner.placements(seen.fleet.pods)}


def pulled(seen: Scene) -> dict[str, Placement]:
    """What is planned to be pulled, by who pulls."""
    planner = Planner(seen, prompt_token_count(seen))
    return {at.pod.id: at for at in planner.pulling(planner.placements(seen.fleet.pods))}


def senders(seen: Scene) -> dict[str, str]:
    return {name: at.pull.sender.id for name, at in pulled(seen).items() if at.pull}


# --- what a pod has itself ---


@given(
    held=st.integers(0, 80),
    tokens=st.integers(1, 1280),
    engine_block=st.sampled_from([None, 16, 32, 64]),
    trust=st.sampled_from(PrefixTrust),
)
def test_cached_tokens_are_what_the_engine_will_report(
    held: int, tokens: int, engine_block: int | None, trust: PrefixTrust
) -> None:
    """Whole engine blocks, held, short of the whole prompt; nothing where trust is missing; and as many as that."""
    asked = prompt(tokens)
    held = min(held, len(asked.hashes))
    one = pod("a", block_size_tokens=engine_block, trust=trust)
    cached = expected_cached_tokens(holding(scene(*ready(one), prompt=asked), "a", held), one)
    if trust is not PrefixTrust.TRUSTED:
        assert cached == 0
        return
    block = engine_block or BLOCK
    assert cached % block == 0
    assert cached <= held * BLOCK
    assert cached < tokens
    one_more = cached + block
    assert one_more > held * BLOCK or one_more >= tokens


@given(
    held=st.tuples(*[st.integers(0, 40)] * 4),
    tokens=st.integers(1, 1280),
    engine_block=st.sampled_from([None, 32, 64]),
)
def test_tiers_are_counted_nearest_first(held: BlocksByTier, tokens: int, engine_block: int | None) -> None:
    """The head of the prompt lies in the nearest tier; what cannot be used is taken off the farthest."""
    at = placed(
        scene(*ready(pod("a", block_size_tokens=engine_block)), prompt=prompt(tokens), match=PrefixMatch({"a": held}))
    )["a"]
    assert at.own_tokens == at.cached_tokens == sum(at.held_tokens)
    left = at.cached_tokens
    for blocks, counted in zip(held, at.held_tokens, strict=True):
        assert counted == min(blocks * BLOCK, left)
        left -= counted


def test_a_placement_has_the_facts_of_pod_request_and_time() -> None:
    one, work = pod("a", capacity_tokens=800), InFlight(2, 1, 30, 4.0, 70)
    seen = scene(*ready(one), prompt=prompt(100), inflight={"a": work}, now_s=7.0, shared_blocks=3)
    at = placed(seen)["a"]
    assert (at.pod, at.inflight, at.request.now_s, at.request.links) == (one, work, 7.0, Links())
    assert (at.request.prompt_tokens, at.request.shared_tokens, at.request.output_tokens) == (100, 48, 256)
    assert at.pull is None and at.handoff is None


def test_the_capacity_of_a_pod_does_not_depend_on_the_block_size() -> None:
    """A prompt that was not tokenized fits into the same cache as one that was."""
    full = PodStatus(pod("a", capacity_tokens=10_000), PodState.READY, PodLoad(running=3, kv_usage=0.98))
    for asked in (None, prompt(100)):
        small = scene(full, prompt=asked, expected_output_tokens=10)
        assert decide(small, policy("kv_wait")).candidates[0].cost.total_ms == 0
        large = structs.replace(small, expected_output_tokens=256)
        assert decide(large, policy("kv_wait")).candidates[0].cost.total_ms > 0


def test_the_last_token_of_a_prompt_is_never_shared() -> None:
    """Engines compute it in any case."""
    seen = scene(*ready(pod("a")), prompt=prompt(96), shared_blocks=6)
    assert placed(seen)["a"].request.shared_tokens == 95


# --- what a peer can send ---


def test_what_is_sent_is_what_the_holder_has_beyond_the_pod() -> None:
    """60 blocks there, 20 here: 640 tokens over 1 ms and a megabyte a ms."""
    at = pulled(asked(peer("holder"), peer("near"), held={"holder": 60, "near": 20}))["near"]
    assert (at.own_tokens, at.cached_tokens) == (320, 960)
    assert at.pull is not None
    assert (at.pull.sender.id, at.pull.link.t0_ms) == ("holder", 1.0)
    assert at.pull.transfer_ms == pytest.approx(1.0 + 0.64)


def test_the_longest_holder_sends_to_everybody_but_itself() -> None:
    """Who holds as much needs nothing."""
    pods = [peer(name) for name in "abcd"]
    assert senders(asked(*pods, held={"a": 50, "b": 80, "c": 70, "d": 80})) == {"a": "b", "c": "b"}


@pytest.mark.parametrize(
    "facts",
    [{"pulls": ""}, {"trust": PrefixTrust.UNTESTED}, {"trust": PrefixTrust.MISMATCH}],
    ids=["cannot send", "untested", "mismatch"],
)
def test_a_holder_that_cannot_be_used_leaves_it_to_the_next(facts: Mapping[str, Any]) -> None:
    """However much it holds."""
    seen = asked(peer("most", **facts), peer("less"), peer("idle"), held={"most": 90, "less": 60})
    assert senders(seen)["idle"] == "less"


@pytest.mark.parametrize("state", [state for state in PodState if state is not PodState.READY])
def test_a_holder_that_is_not_ready_leaves_it_to_the_next(state: PodState) -> None:
    """It may be gone before it has sent."""
    statuses = PodStatus(peer("most"), state), *ready(peer("less"), peer("idle"))
    assert senders(asked(held={"most": 90, "less": 60}, statuses=statuses))["idle"] == "less"


@pytest.mark.parametrize(
    "facts",
    [
        *({"engine": "sglang"}, {"version": "0.9"}, {"front_end": "rust"}, {"pulls": "mooncake"}, {"pulls": ""}),
        {"kv_bytes_per_token": 0},
    ],
    ids=["engine", "version", "front end", "dialect", "cannot pull", "size unknown"],
)
def test_kv_is_pulled_only_between_compatible_pods(facts: Mapping[str, Any]) -> None:
    """KV is the same only within one engine and version, and needs a dialect that both speak and a size to price."""
    assert senders(asked(peer("holder"), peer("other", **facts), peer("like"), held={"holder": 90})) == {
        "like": "holder"
    }


def test_nothing_is_sent_where_no_link_leads() -> None:
    """A holder in another zone, and only a link within zones."""
    pods = peer("holder", zone="z1"), peer("near", zone="z1"), peer("far", zone="z2")
    assert senders(asked(*pods, held={"holder": 90}, links=Links(same_zone=LINK))) == {"near": "holder"}
    assert not senders(asked(*pods, held={"holder": 90}, links=Links()))


def test_the_nearest_link_is_taken() -> None:
    """Within a rack as fast as the rack is."""
    pods = peer("holder", rack="r1"), peer("near", rack="r1"), peer("far", rack="r2")
    found = pulled(asked(*pods, held={"holder": 90}, links=Links(same_rack=LINK, elsewhere=Link(5.0, 1e6))))
    assert {name: at.pull.link.t0_ms for name, at in found.items() if at.pull} == {"near": 1.0, "far": 5.0}


def test_of_equal_holders_the_one_with_the_fewest_transfers_sends() -> None:
    """Its network card is shared by all who pull from it."""
    pods, held = [peer(name) for name in "abc"], {"a": 90, "b": 90}
    for busy, other in (("a", "b"), ("b", "a")):
        assert senders(asked(*pods, held=held, inflight={busy: InFlight(pulls=1)}))["c"] == other


def test_each_transfer_under_way_at_the_sender_takes_as_long_again() -> None:
    """t0 + bytes / B * (1 + k); and in the end it is sooner computed."""
    pods, held = (peer("holder"), peer("idle")), {"holder": BLOCKS}
    for transfers, expected_ms in ((0, 2.6), (1, 4.2), (18, 31.4)):
        at = pulled(asked(*pods, held=held, inflight={"holder": InFlight(pulls=transfers)}))["idle"]
        assert at.pull is not None and at.pull.transfer_ms == pytest.approx(expected_ms)
    compute_ms = SPEED.compute_ms(0, 1600)
    enough = int((compute_ms - 1.0) / 1.6)
    assert not pulled(asked(*pods, held=held, inflight={"holder": InFlight(pulls=enough)}))


engine_blocks = st.sampled_from([None, 16, 32, 64])


@st.composite
def linked(draw: st.DrawFn, *, idle: bool = False) -> Scene:
    """Pods that hold any blocks, with any links."""
    names = [f"pod-{number}" for number in range(draw(st.integers(2, 5)))]
    pods = [
        peer(
            name,
            block_size_tokens=draw(engine_blocks),
            trust=draw(st.sampled_from([PrefixTrust.TRUSTED, PrefixTrust.TRUSTED, PrefixTrust.UNTESTED])),
            version=draw(st.sampled_from(["1", "1", "2"])),
        )
        for name in names
    ]
    works = (
        st.builds(InFlight, pulls=st.integers(0, 3))
        if idle
        else st.builds(InFlight, prefill_ms=st.floats(0, 60), pulls=st.integers(0, 3))
    )
    return asked(
        *pods,
        held={name: draw(st.integers(0, BLOCKS)) for name in names},
        inflight={name: draw(works) for name in names},
        links=Links(elsewhere=draw(links)),
    )


@given(seen=linked())
def test_a_pull_brings_more_in_less_time_than_computing_takes(seen: Scene) -> None:
    """From a pod of the same engine and version that is known to hold it, in whole blocks of the one that pulls."""
    for name, at in pulled(seen).items():
        assert at.pull is not None
        sender = at.pull.sender
        assert sender.id != name
        assert (sender.engine, sender.version, sender.pulls) == (at.pod.engine, at.pod.version, at.pod.pulls)
        assert at.own_tokens < at.cached_tokens <= expected_cached_tokens(seen, sender)
        assert at.cached_tokens % (at.pod.block_size_tokens or BLOCK) == 0
        assert at.pull.transfer_ms < SPEED.compute_ms(at.own_tokens, at.cached_tokens)
        assert at.own_tokens == placed(seen)[name].own_tokens


@given(seen=linked())
def test_a_pull_is_chosen_only_where_it_is_cheaper(seen: Scene) -> None:
    """By the whole price; each pod is in the list once, and nobody pays more because it might pull."""
    without = {each.pod.id: each for each in decide(seen, policy("queue", "prefill")).candidates}
    found = decide(seen, PULLING).candidates
    assert sorted(each.pod.id for each in found) == sorted(without)
    for each in found:
        assert isinstance(each.plan, Direct)
        own = without[each.pod.id]
        assert each.cost.total_ms <= own.cost.total_ms + 1e-6
        if each.plan.pull is None:
            assert (each.cost.total_ms, each.cached_tokens) == (own.cost.total_ms, own.cached_tokens)
        else:
            pulled_tokens = each.cached_tokens - own.cached_tokens
            assert each.plan.pull == Pull(each.plan.pull.holder, each.cached_tokens, pulled_tokens)


def test_a_pull_that_is_dearer_by_the_whole_price_is_not_kept() -> None:
    """2.6 ms against 33 of compute, of which all are credited where everybody will want that prefix."""
    seen = asked(peer("holder"), peer("idle"), held={"holder": BLOCKS}, inflight={"holder": InFlight(1, 1, 0, 500.0)})
    crediting = policy("queue", "prefill", "hot_prefix_credit", "transfer")
    for shared_blocks, pull in ((0, Pull("holder", 1600, 1600)), (BLOCKS, None)):
        best = decide(structs.replace(seen, shared_blocks=shared_blocks), crediting).candidates[0]
        assert (best.pod.id, best.plan.pull) == ("idle", pull)


@given(seen=linked(idle=True), which=st.integers(0, 4), more=st.integers(1, BLOCKS))
def test_more_cached_blocks_never_raise_the_cost_of_a_pod_that_could_pull(seen: Scene, which: int, more: int) -> None:
    """Nothing waits there: what has travelled while others were computed is had for nothing, and may be worth more."""
    lucky = seen.fleet.pods[which % len(seen.fleet.pods)].pod.id
    blocks = min(seen.match.held_blocks(lucky) + more, BLOCKS)
    before, after = (
        {each.pod.id: each.cost.total_ms for each in decide(one, PULLING).candidates}
        for one in (seen, holding(seen, lucky, blocks))
    )
    assert after[lucky] <= before[lucky] + 1e-6


# --- at a first glance ---

C1 = policy(costs={"prefill": {}}).costs
"""Weighs an uncached token with c1, and with c2 in long prompts."""


def test_without_a_limit_and_within_it_everybody_is_looked_at() -> None:
    """In the order of the snapshot."""
    seen = scene(*ready(*(pod(name) for name in "abc")))
    for most in (0, 3, 4):
        assert Planner(seen, 1000).most_promising(seen.fleet.pods, C1, most) == seen.fleet.pods


def test_the_most_promising_hold_much_and_have_little_to_do() -> None:
    """10,000 tokens take 240 ms to compute; the first prompt in line has had its time by now."""
    long_queue, over = InFlight(1, 1, prefill_ms=500.0), InFlight(1, 1, 0, 500.0, head_ms=500.0, head_since_s=4.0)
    pods = ready(*(pod(name) for name in ("busy", "cold", "done", "held")))
    inflight = {"busy": long_queue, "done": over, "held": InFlight(1, 1, prefill_ms=30.0)}
    seen = holding(scene(*pods, prompt=prompt(10_000), inflight=inflight, now_s=4.5), "held", 600)
    assert [one.pod.id for one in Planner(seen, 10_000).most_promising(pods, C1, 1)] == ["held"]
    assert {one.pod.id for one in Planner(seen, 10_000).most_promising(pods, C1, 3)} == {"held", "cold", "done"}


def test_a_prefix_that_all_pods_can_read_is_not_worth_as_much_as_one_in_the_gpu() -> None:
    """9,600 tokens of 131 kB take 105 ms over the link; 60 ms of queue at the pod that holds them are less."""
    pods = ready(*(pod(name, kv_bytes_per_token=131_072) for name in ("held", "idle", "other")))
    blocks = {"held": (600, 0, 0, 0), "idle": (0, 0, 0, 600), "other": (0, 600, 0, 0)}
    inflight, store = {"held": InFlight(1, 1, prefill_ms=60.0)}, Link(0.0, 12e6)
    for known, first in (
        (Links(cpu=store, remote=store), "held"),
        (Links(cpu=store), "idle"),
        (Links(remote=store), "other"),
    ):
        seen = scene(*pods, prompt=prompt(10_000), inflight=inflight, match=PrefixMatch(blocks), links=known)
        assert [one.pod.id for one in Planner(seen, 10_000).most_promising(pods, C1, 1)] == [first]


def test_an_uncached_token_may_cost_more_than_c1() -> None:
    """2,000 held tokens are worth 40 ms of queue, or 80 where each of them counts twice."""
    pods = ready(*(pod(name) for name in ("cold", "held")))
    queue = {"held": InFlight(1, 1, prefill_ms=60.0)}
    seen = holding(scene(*pods, prompt=prompt(2001), inflight=queue), "held", 125)
    twice = policy(costs={"prefill": {}, "eviction": {"reuse": 1.0}}).costs
    for costs, first in ((C1, "cold"), (twice, "held")):
        assert [one.pod.id for one in Planner(seen, 2001).most_promising(pods, costs, 1)] == [first]


def test_what_a_missing_token_costs_is_what_all_terms_say() -> None:
    """c1 and the mean of c2 over the prompt, and once more c1 where it displaces another."""
    seen = scene(*ready(pod("a")), prompt=prompt(1001))
    attention = SPEED.c2_ms_per_token2 * 1000 / SPEED.c1_ms_per_token
    for terms, expected in (({"prefill": {}}, 1.0), ({"prefill": {}, "eviction": {"reuse": 1.0}}, 2.0), ({}, 0.0)):
        assert Planner(seen, 1001).missing_weight(pod("a"), policy(costs=terms).costs) == pytest.approx(
            expected + bool(terms) * attention
        )


def test_among_equal_pods_the_key_selects_the_shortlist() -> None:
    """The same ones every time for one prefix, and all in turn over many."""
    pods = ready(*(pod(f"pod-{number}") for number in range(8)))
    looked_at: set[str] = set()
    for salt in range(60):
        seen = scene(*pods, prompt=prompt(200, salt * 1000))
        found = [one.pod.id for one in Planner(seen, 200).most_promising(pods, C1, 2)]
        later = structs.replace(seen, turn=9)
        assert found == [one.pod.id for one in Planner(later, 200).most_promising(pods, C1, 2)]
        looked_at.update(found)
    assert len(looked_at) == 8


def test_pictures_are_work_but_only_what_is_known_can_be_too_long() -> None:
    """The estimate of their tokens raises every price, excludes no pod and is recorded."""
    pods = ready(pod("a", max_model_len_tokens=TOKENS + 2), pod("b", max_model_len_tokens=TOKENS + 2))
    text = scene(*pods, prompt=prompt(TOKENS))
    pictures = structs.replace(text, prompt=structs.replace(prompt(TOKENS), media_tokens=5_000))
    assert (prompt_token_count(text), prompt_token_count(pictures)) == (TOKENS, TOKENS + 5_000)
    by = policy("queue", "prefill")
    cheap, dear = decide(text, by), decide(pictures, by)
    assert {one.pod.id for one in dear.candidates} == {"a", "b"}
    assert min(one.cost.total_ms for one in dear.candidates) > max(one.cost.total_ms for one in cheap.candidates)
    again = decide(record(pictures).scene(), by)
    assert [(one.pod.id, one.cost) for one in again.candidates] == [(one.pod.id, one.cost) for one in dear.candidates]
