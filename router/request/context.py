"""The state of one request while it is served, filled phase by phase, and its summaries at the end."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from router.admission.quotas import Hold
from router.admission.tenant import OPEN_TENANT, Tenant
from router.decision import Candidate, Direct, RouteDecision, Split
from router.engines.handoff.dialect import split_refusal
from router.engines.lacks import USAGE_OF_STREAMS, needs
from router.errors import INTERNAL
from router.observe.ended import Failure, RecordedDecision
from router.phases import Phases
from router.policy.decide import expected_ttft_ms
from router.policy.plans import unread_tokens
from router.policy.retry import is_repeatable
from router.policy.spec import Policy
from router.request.inbound import Head, HeaderList, first_values
from router.request.response_reader import ResponseReader
from router.request.usage_filter import without_asking
from router.types import InferenceRequest, PodId, PrefixTrust, PromptPrefix, UsageShown

MAX_TOKENS_PER_S = 2000
"""More than a pod decodes for one request: of tokens that it does not send, such as hidden reasoning."""
MAX_UNREAD_PROMPT_TOKENS = 1 << 20
"""At most counted for a prompt that the router does not read to its end."""

MAX_PICTURE_TOKENS = 4096
"""Pictures may add as many to a prompt whose length is only estimated."""


class RequestContext(msgspec.Struct, eq=False):
    request: InferenceRequest
    head: Head
    phases: Phases
    tenant: Tenant = OPEN_TENANT
    owner: str = ""
    """Whose share of the router's limits it uses, and whose vote against a pod it has: `FairBound`. Empty: unknown."""
    hold: Hold | None = None
    """What it has been counted with, if its tenant has quotas."""
    limit_headers: HeaderList = []
    """Its tenant's limits, for the response."""
    prompt: PromptPrefix | None = None
    unread: str = ""
    """Why the prompt could not be read."""
    compared: tuple[str, ...] = ()
    """Rules of chats that may concern it, if its pod's count of prompt tokens is compared."""
    stored_pod: PodId = ""
    """The pod that has the stored response which the request needs."""
    workload: str = ""
    """Workload class; empty until the request is decided."""
    policy: Policy | None = None
    decision: RouteDecision | None = None
    recorded: RecordedDecision | None = None
    candidate: Candidate | None = None
    reader: ResponseReader = msgspec.field(default_factory=ResponseReader)
    status: int = 0
    first_token_s: float | None = None
    handed_over_cached_tokens: int | None = None
    """Cached tokens that the prefill pod of a split reported."""
    waited_s: float = 0.0
    """In front of the fleet, for a place."""
    ttft_limit_ms: float | None = None
    """The latest first token that its SLO allows; None without one, or while a queue obeys its client's own limit."""
    sent_s: float = 0.0
    """When the latest attempt began."""
    tries: int = 0
    failures: tuple[Failure, ...] = ()
    failed_before: int = 0
    """Number of those of other models, before it began again."""
    pods_failed: int = 0
    """Attempts that failed after a pod received the request, by all models: it may be the cause."""
    continued: tuple[str, ...] = ()
    """How each later pod continued the stream."""
    answered_tokens: int = 0
    """Tokens of the answer that the pod gets with the prompt: a later one computes both."""
    has_sent: bool = False
    """Whether a piece was given to the client: then nothing can be retried."""
    suspects: tuple[PodId, ...] = ()
    """Pod of each attempt that failed after a pod received the request, until another pod serves it; "" if unknown."""
    result: str = INTERNAL
    error: str = ""
    """The message of the router's error."""
    is_unseen: bool = False
    """Whether the bytes of the response do not pass here."""
    is_picked: bool = False
    """Whether a gateway knows the pod: then it alone may try others."""
    held_until_s: float = 0.0
    """Until when it may wait for a pod that serves it; 0: not at all."""
    unread_tokens: int = 0
    """Assumed length of the prompt in a dropped body."""
    _split_refusal: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; estimated from the body where not all of the prompt was tokenized."""
        read_tokens = self.prompt.token_count if self.prompt else 0
        if read_tokens and self.request.prompts == 1:
            return read_tokens
        return max(read_tokens, self.unread_tokens or unread_tokens(self.request))

    @property
    def is_first_attempt(self) -> bool:
        """Whether the time since its arrival is that of one attempt, and of its queue."""
        return self.tries == 1 and not self.request.fallback

    @property
    def needs_place(self) -> bool:
        """Whether a pod has to compute a prompt: not to fetch or cancel a response, or to count tokens."""
        return self.prompt is not None or (self.prompt_tokens > 0 and not self.request.endpoint.api.is_about_tokens)

    def drop_prompt(self) -> None:
        """Free the body and the tokens once the response has begun and no retry is possible: the prompt's length and
        hashes, which remain, take a twentieth of the memory."""
        self.unread_tokens = self.unread_tokens or unread_tokens(self.request)
        kept = {name: value for name, value in self.request.prompt.items() if name in ("background", "store")}
        self.request = replace(self.request, body=b"", prompt=kept)
        if self.prompt is not None:
            self.prompt = _without_tokens(self.prompt)

    def begin_again(self, request: InferenceRequest) -> None:
        """Begin with another model. What was found for the last one counts no more, but for its failures."""
        self.request, self.reader = request, ResponseReader(self.reader.format)
        self.prompt = self.policy = self.decision = self.candidate = self.ttft_limit_ms = None
        self.unread, self.workload, self.limit_headers, self.tries, self.status = "", "", [], 0, 0
        self.compared, self._split_refusal, self.failed_before = (), None, len(self.failures)

    def ask_no_usage(self) -> None:
        """Send the body without what only the router has asked for."""
        if self.request.usage is UsageShown.NONE:
            body = without_asking(self.request.body)
            self.request = replace(self.request, body=body, usage=UsageShown.ALL)

    @property
    def needs(self) -> tuple[str, ...]:
        """What this request needs that not every pod of its model has."""
        return needs(self.request, self.head.target)

    @property
    def asks(self) -> tuple[str, ...]:
        """What it asks for: what it needs, and what only the router wants of it."""
        return (*self.needs, USAGE_OF_STREAMS) if self.request.usage is UsageShown.NONE else self.needs

    @property
    def client(self) -> str:
        """The tenant, else the address and a digest of the credentials of the client: behind a gateway, all have one
        address."""
        if self.request.tenant:
            return self.request.tenant
        headers = first_values(self.head.headers)
        credentials = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
        return f"{self.head.peer} {xxh3_64_hexdigest(credentials)}"

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again after a pod received it."""
        return is_repeatable(self.request, self.head.method)

    @property
    def may_be_stored(self) -> bool:
        """Whether a pod may keep the response for later requests."""
        return self.request.endpoint.api.may_be_stored and self.request.prompt.get("store") is not False

    @property
    def is_in_background(self) -> bool:
        """Whether the pod generates after its answer, which its client fetches later, or never."""
        return self.request.prompt.get("background") is True and self.status < 400

    @property
    def prefill_pod(self) -> PodId:
        """The prefill pod of a split, else ""."""
        plan = self.candidate.plan if self.candidate else None
        return plan.prefill.id if isinstance(plan, Split) else ""

    @property
    def unmatched(self) -> str:
        """Why nothing of the prompt was matched on the pod that computes it; "" if it was, or if there is no prompt."""
        if self.prompt is None or self.candidate is None:
            return self.unread
        plan = self.candidate.plan
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        if pod.reads_alike(self.request.endpoint):
            return ""
        return "conversion_untested" if pod.trust is PrefixTrust.TRUSTED else f"self_test_{pod.trust.value}"

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens as reported by the pod that computed the prompt; None where it did not report them."""
        split = self.candidate is not None and isinstance(self.candidate.plan, Split)
        return self.handed_over_cached_tokens if split else self.reader.cached_tokens

    def split_refusal(self) -> str:
        """Why this request cannot be split; "" where it can. The body is parsed once."""
        if self._split_refusal is None:
            self._split_refusal = split_refusal(self.request.endpoint, self.request.body, self.request.prompts)
        return self._split_refusal


def counted_output_tokens(context: RequestContext, elapsed_s: float) -> int | None:
    """Output tokens that the pod reports: at most what was asked of it, and what it can have computed and sent."""
    reader, request = context.reader, context.request
    reported = reader.output_tokens
    if reported is None:
        return None
    most = reader.size_bytes + int(elapsed_s * MAX_TOKENS_PER_S)
    if request.max_output_tokens is not None and request.endpoint.api.is_chat:
        most = min(most, request.max_output_tokens * request.choices)
    return min(reported, most)


def _without_tokens(prompt: PromptPrefix) -> PromptPrefix:
    others = tuple((name, other and _without_tokens(other)) for name, other in prompt.others)
    return replace(prompt, tokens=range(len(prompt.tokens)), others=others)


def counted_prompt_tokens(context: RequestContext) -> int | None:
    """Prompt tokens that the pod reports; the router's own number where that cannot be true."""
    reported, own, prompt = context.reader.prompt_tokens, context.prompt_tokens, context.prompt
    is_read = prompt is not None and not prompt.has_media and context.request.endpoint.api.is_chat
    most = 2 * own + 256 if is_read else _most_unread_tokens(context, own)
    return reported if reported is None or reported <= most else own


def _most_unread_tokens(context: RequestContext, own: int) -> int:
    """The most prompt tokens that are believed of a prompt that was not read; of a provider, which takes money for
    them, with room for a few pictures."""
    is_hosted = context.candidate is not None and context.candidate.money is not None
    return 2 * own + MAX_PICTURE_TOKENS if is_hosted else MAX_UNREAD_PROMPT_TOKENS


def ttft_of_one_pod(context: RequestContext) -> tuple[PodId, float, float] | None:
    """(pod, expected ms, actual ms) of the first token, where one pod alone is responsible for the difference."""
    if not (context.request.stream and context.is_first_attempt) or context.prompt is None or context.prompt.has_media:
        return None
    first_token_s, candidate = context.first_token_s, context.candidate
    if first_token_s is None or candidate is None or not isinstance(candidate.plan, Direct) or candidate.plan.pull:
        return None
    return candidate.pod.id, expected_ttft_ms(candidate.cost), (first_token_s - context.waited_s) * 1000
