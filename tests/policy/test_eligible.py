"""Who may serve at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ContextTooLong, NoReadyPod
from router.policy.eligible import eligible
from router.types import Endpoint, PodState, PodStatus, PrefixTrust, Role, Scene
from tests.kit.scenes import MODEL, pod, ready, request, scene, scenes


def test_a_model_whose_last_pod_has_left_has_no_ready_pod() -> None:
    """It exists: a client that asks for one that does not was refused before."""
    other = PodStatus(pod("a", models=("other",)), PodState.EJECTED)
    with pytest.raises(NoReadyPod, match=f"No pod that serves `{MODEL}` is known"):
        eligible(scene(other), 10)


@pytest.mark.parametrize("state", [state for state in PodState if state is not PodState.READY])
def test_nothing_ready_comes_before_too_long(state: PodState) -> None:
    """And the message says how each pod is."""
    short = PodStatus(pod("a", max_model_len_tokens=5), state)
    with pytest.raises(NoReadyPod, match=f"a is {state.value}"):
        eligible(scene(short), 10)


def test_a_prefill_pod_alone_serves_no_request() -> None:
    """It cannot answer a whole request."""
    with pytest.raises(NoReadyPod):
        eligible(scene(*ready(pod("a", role=Role.PREFILL))), 10)


@pytest.mark.parametrize(("endpoint", "param"), [(Endpoint.CHAT, "messages"), (Endpoint.COMPLETIONS, "prompt")])
def test_too_long_for_all_names_the_longest_and_the_field(endpoint: Endpoint, param: str) -> None:
    """As the engines' own message does."""
    pods = ready(pod("a", max_model_len_tokens=5), pod("b", max_model_len_tokens=10))
    with pytest.raises(ContextTooLong, match=r"10 tokens, but the prompt has 10\.") as caught:
        eligible(scene(*pods, request=request(endpoint=endpoint)), 10)
    assert caught.value.param == param


@given(
    limits=st.lists(st.tuples(st.none() | st.integers(1, 100), st.sampled_from(PrefixTrust)), min_size=1, max_size=5),
    tokens=st.integers(0, 120),
)
def test_a_prompt_is_refused_only_when_every_pod_is_trusted_and_too_short(
    limits: list[tuple[int | None, PrefixTrust]], tokens: int
) -> None:
    """An answer needs room for one token. Where our count is unproven, the engine judges."""
    pods = [pod(f"p{n}", max_model_len_tokens=limit, trust=trust) for n, (limit, trust) in enumerate(limits)]
    hopeless = all(limit is not None and limit <= tokens and trust is PrefixTrust.TRUSTED for limit, trust in limits)
    if hopeless:
        with pytest.raises(ContextTooLong):
            eligible(scene(*ready(*pods)), tokens)
    else:
        assert eligible(scene(*ready(*pods)), tokens).direct


def test_a_pod_with_room_for_the_output_goes_first_and_without_one_all_stay() -> None:
    """The asked-for output is a wish, the prompt a fact."""
    pods = ready(pod("long", max_model_len_tokens=1000), pod("short", max_model_len_tokens=100))
    for asked, expected in ((500, ["long"]), (5000, ["long", "short"]), (None, ["long", "short"])):
        found = eligible(scene(*pods, request=request(max_output_tokens=asked)), 50)
        assert [status.pod.id for status in found.direct] == expected


def test_an_adapter_is_served_where_it_is_loaded() -> None:
    """Not wherever its base model is."""
    pods = ready(pod("base"), pod("tuned", adapters=("lora",)))
    found = eligible(scene(*pods, request=request(adapter="lora")), 10)
    assert [status.pod.id for status in found.direct] == ["tuned"]


@given(seen=scenes())
def test_the_order_of_the_snapshot_stays(seen: Scene) -> None:
    """Filtering never reorders: what is in turn is in turn by id."""
    try:
        found = [status.pod.id for status in eligible(seen, 0).direct]
    except (NoReadyPod, ContextTooLong):
        return
    assert found == sorted(found)


def names(statuses: list[PodStatus]) -> list[str]:
    return [status.pod.id for status in statuses]


def test_each_role_may_do_its_part() -> None:
    """Whole requests are for who answers; to share one needs a dialect."""
    pods = ready(
        pod("both", handoff="nixl"),
        pod("decode", role=Role.DECODE, handoff="nixl"),
        pod("mute", role=Role.DECODE),
        pod("prefill", role=Role.PREFILL, handoff="nixl"),
        pod("prefill-mute", role=Role.PREFILL),
    )
    found = eligible(scene(*pods), 10)
    assert names(found.direct) == ["both", "decode", "mute"]
    assert names(found.prefill) == ["both", "prefill"]
    assert names(found.decode) == ["both", "decode"]


def test_without_roles_no_pair_is_eligible() -> None:
    """With any dialects."""
    found = eligible(scene(*ready(pod("a", handoff="nixl"), pod("b", handoff="nixl"))), 10)
    assert (names(found.direct), found.prefill, found.decode) == (["a", "b"], [], [])


def test_a_prefill_pod_needs_room_for_the_prompt_alone() -> None:
    """The output is made elsewhere; and the decode side must have room for both."""
    pods = ready(
        pod("d-long", role=Role.DECODE, handoff="nixl", max_model_len_tokens=1000),
        pod("d-short", role=Role.DECODE, handoff="nixl", max_model_len_tokens=100),
        pod("p-long", role=Role.PREFILL, handoff="nixl", max_model_len_tokens=100),
        pod("p-short", role=Role.PREFILL, handoff="nixl", max_model_len_tokens=50),
    )
    found = eligible(scene(*pods, request=request(max_output_tokens=500)), 50)
    assert names(found.prefill) == ["p-long"]
    assert names(found.decode) == names(found.direct) == ["d-long"]


@given(seen=scenes())
def test_whoever_may_do_anything_is_ready_and_serves_the_model(seen: Scene) -> None:
    """And has the role for it."""
    try:
        found = eligible(seen, 0)
    except (NoReadyPod, ContextTooLong):
        return
    assert found.direct
    for status in (*found.direct, *found.prefill, *found.decode):
        assert status.state is PodState.READY and MODEL in status.pod.models
    assert all(status in found.direct for status in found.decode)
    assert all(status.pod.role is not Role.PREFILL for status in found.direct)
    assert all(status.pod.role is not Role.DECODE for status in found.prefill)
