"""Who may make admin calls?

Only this very machine: whoever may add a pod may read every prompt. This file knows no call.
"""

from __future__ import annotations

import ipaddress

from fastapi import Request
from starlette.exceptions import HTTPException


def only_local(request: Request) -> None:
    """Refuse the call of anybody else with 403."""
    host = request.client.host if request.client else ""
    try:
        local = not host or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise HTTPException(403, "Admin calls are taken from the router's own machine only.")
