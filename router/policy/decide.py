"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The live proxy, the
simulator and the tests call this very function. It never waits, draws a random number or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.policy.filters import eligible
from router.policy.spec import Policy
from router.policy.term import Placement
from router.types import Candidate, Cost, Direct, InFlight, Pod, PodStatus, PrefixTrust, RouteDecision, Scene

BYTES_PER_TOKEN = 4
"""How long a token is in a body whose tokens we do not know."""
DEFAULT_OUTPUT_TOKENS = 256
_IDLE = InFlight()


def decide(scene: Scene, policy: Policy) -> RouteDecision:
    """Every pod that may serve, best first, with its price in milliseconds.

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`. O(pods of the model * cost terms).
    """
    prompt_tokens = prompt_token_count(scene)
    shared_tokens = _shared_tokens(scene)
    statuses = eligible(scene, prompt_tokens if scene.prompt else 0)
    terms = [(name, term.cost_ms) for name, term in policy.costs]
    candidates = [_price(scene, status, terms, prompt_tokens, shared_tokens) for status in statuses]
    ranked, reason = policy.picker.rank(scene, candidates)
    return RouteDecision(policy.name, policy.version, tuple(ranked), reason)


def prompt_token_count(scene: Scene) -> int:
    """Tokens of the prompt, estimated from the body where they are unknown."""
    return scene.prompt.token_count if scene.prompt else len(scene.request.body) // BYTES_PER_TOKEN


def expected_cached_tokens(scene: Scene, pod: Pod) -> int:
    """How many prompt tokens `pod`'s engine should report as cached.

    Whole engine blocks only, and never the whole prompt: engines always compute at least its last token.
    Zero while the pod's tokens and hashes are unproven.
    """
    held = scene.match.blocks.get(pod.id)
    if held is None:  # most pods, most of the time
        return 0
    prompt = scene.prompt
    if prompt is None or pod.trust is not PrefixTrust.TRUSTED:
        return 0
    block = pod.block_size_tokens or prompt.block_size_tokens
    return min(sum(held) * prompt.block_size_tokens, max(prompt.token_count - 1, 0)) // block * block


def _price(
    scene: Scene,
    status: PodStatus,
    terms: Sequence[tuple[str, Callable[[Placement], float]]],
    prompt_tokens: int,
    shared_tokens: int,
) -> Candidate:
    pod = status.pod
    cached_tokens = expected_cached_tokens(scene, pod)
    at = Placement(
        pod,
        status.load,
        scene.inflight.get(pod.id, _IDLE),
        prompt_tokens,
        cached_tokens,
        shared_tokens,
        scene.request.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
    )
    parts: list[tuple[str, float]] = []
    total_ms = 0.0
    for name, cost_ms in terms:
        ms = cost_ms(at)
        parts.append((name, ms))
        total_ms += ms
    return Candidate(Direct(pod), Cost(tuple(parts), total_ms), cached_tokens)


def _shared_tokens(scene: Scene) -> int:
    """Tokens of the shared prefix, short of the whole prompt."""
    if scene.prompt is None:
        return 0
    return min(scene.shared_blocks * scene.prompt.block_size_tokens, max(scene.prompt.token_count - 1, 0))
