"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The live proxy, the
simulator and the tests call this very function. It never waits, draws a random number or reads a clock.
"""

from __future__ import annotations

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
    statuses = eligible(scene, prompt_tokens if scene.prompt else 0)
    candidates = [_price(scene, status, policy, prompt_tokens) for status in statuses]
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
    prompt = scene.prompt
    if prompt is None or pod.trust is not PrefixTrust.TRUSTED:
        return 0
    held_blocks = scene.match.held_blocks(pod.id)
    if not held_blocks:
        return 0
    block = pod.block_size_tokens or prompt.block_size_tokens
    return min(held_blocks * prompt.block_size_tokens, prompt.token_count - 1) // block * block


def _price(scene: Scene, status: PodStatus, policy: Policy, prompt_tokens: int) -> Candidate:
    pod = status.pod
    cached_tokens = expected_cached_tokens(scene, pod)
    at = Placement(
        pod=pod,
        load=status.load,
        inflight=scene.inflight.get(pod.id, _IDLE),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        shared_tokens=_shared_tokens(scene),
        output_tokens=scene.request.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
    )
    parts = tuple((name, term.cost_ms(at)) for name, term in policy.costs)
    return Candidate(Direct(pod), Cost(parts, sum(ms for _, ms in parts)), cached_tokens)


def _shared_tokens(scene: Scene) -> int:
    """Tokens of the shared prefix, short of the whole prompt."""
    if scene.prompt is None:
        return 0
    return min(scene.shared_blocks * scene.prompt.block_size_tokens, max(scene.prompt.token_count - 1, 0))
