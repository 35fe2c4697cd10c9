"""What a front must do while a request is prepared: the values that `Requests.prepare` yields.

Each says what its answer is, which the front sends back. An exception is thrown into the generator instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from router.admission.fair_order import Waiting
from router.admission.tenant import Tenant
from router.request.context import RequestContext
from router.types import InferenceRequest


class Locate(NamedTuple):
    """Find a stored response, also at other routers, for its `owner`; None: an operator, who may see all. `param`: the
    field with the id. Answer: a `StoredResponse`. Error: `UnknownResponse`."""

    response_id: str
    param: str
    owner: str | None


class Tokens(NamedTuple):
    """Render and tokenize a prompt, outside of the event loop where it is long. Answer: its `PromptPrefix`, or None
    where it cannot be known."""

    request: InferenceRequest


class WithoutUuids(NamedTuple):
    """Remove the `uuid` of pictures. Answer: the body."""

    body: bytes
    tenant: Tenant


class QuotaSync(NamedTuple):
    """Wait until shares of quotas have been exchanged with other processes. Answer: None."""


class Ticket(msgspec.Struct, eq=False):
    """A place in a queue: wait until `settle` is called. Answer: None; error: that of `settle`. A front that stops
    waiting closes the generator, which leaves the queue."""

    context: RequestContext
    waiting: Waiting
    settle: Callable[[Exception | None], None] = lambda _error: None
    """Set by the front; called once, with the error if the request is refused."""


Step: TypeAlias = Locate | Tokens | WithoutUuids | QuotaSync | Ticket
