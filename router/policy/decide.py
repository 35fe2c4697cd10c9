"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The live proxy, the
simulator and the tests call this very function. It never waits, draws a random number or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

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
    placements = _placements(scene, eligible(scene, prompt_tokens if scene.prompt else 0), prompt_tokens)
    ranked, reason = policy.picker.rank(scene, _priced(placements, policy))
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
    if held is None:
        return 0
    prompt = scene.prompt
    if prompt is None or pod.trust is not PrefixTrust.TRUSTED:
        return 0
    block = pod.block_size_tokens or prompt.block_size_tokens
    return min(sum(held) * prompt.block_size_tokens, max(prompt.token_count - 1, 0)) // block * block


def _placements(scene: Scene, statuses: Sequence[PodStatus], prompt_tokens: int) -> list[Placement]:
    inflight, held = scene.inflight, scene.match.blocks
    shared_tokens = _shared_tokens(scene)
    output_tokens = scene.request.max_output_tokens or DEFAULT_OUTPUT_TOKENS
    return [
        Placement(
            status.pod,
            status.load,
            inflight.get(status.pod.id, _IDLE),
            prompt_tokens,
            expected_cached_tokens(scene, status.pod) if status.pod.id in held else 0,
            shared_tokens,
            output_tokens,
        )
        for status in statuses
    ]


def _priced(placements: Sequence[Placement], policy: Policy) -> list[Candidate]:
    """Term by term over all placements: half the price of going pod by pod."""
    names = [name for name, _ in policy.costs]
    columns = [list(map(term.cost_ms, placements)) for _, term in policy.costs]
    rows: Iterable[tuple[float, ...]] = zip(*columns, strict=True) if columns else repeat(())
    return [
        Candidate(Direct(at.pod), Cost(tuple(zip(names, row, strict=True)), sum(row)), at.cached_tokens)
        for at, row in zip(placements, rows, strict=False)
    ]


def _shared_tokens(scene: Scene) -> int:
    """Tokens of the shared prefix, short of the whole prompt."""
    if scene.prompt is None:
        return 0
    return min(scene.shared_blocks * scene.prompt.block_size_tokens, max(scene.prompt.token_count - 1, 0))
