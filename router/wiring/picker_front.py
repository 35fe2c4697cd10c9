"""Builds what serves the requests of a core through a gateway."""

from __future__ import annotations

from functools import partial

from router.config.schema import PickerListen
from router.frontends.extproc.picks import PickForwarder
from router.wiring.http_front import build_forwarder
from router.wiring.program import Front


def picker_front(picker: PickerListen) -> Front:
    """Serves gateways: names the pods of requests, or sends requests to them."""
    if picker.requests == "picker":
        return Front(build_forwarder, has_objectives=True)
    kind = partial(PickForwarder, picker=picker)
    return Front(partial(build_forwarder, kind=kind), hands_over=True, has_objectives=True)
