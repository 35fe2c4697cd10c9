"""How does one look at the policies in force, and have them read anew?

    GET  /admin/policies            what decides now, in the order asked, and why the files may not be in force
    POST /admin/policies/reload     read them now: 200 with what changed, 400 with file and line

From the router's own machine alone. This file never reads a policy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request

from router.api.local import only_local
from router.errors import MalformedRequest
from router.feeds.policies import PolicyFeed, Reload
from router.policy.spec import Policy


def add_policy_calls(app: FastAPI, feed: PolicyFeed, reload_all: Callable[[], Awaitable[Reload]]) -> None:
    """Let the application answer them; `reload_all` for every worker."""

    @app.get("/admin/policies")
    async def policies(request: Request) -> dict[str, Any]:
        only_local(request)
        now = feed.current()
        active = [{"default": policy is now.default, **described(policy)} for policy in now.active]
        return {"version": now.version, "error": feed.error or None, "active": active}

    @app.post("/admin/policies/reload")
    async def reload(request: Request) -> dict[str, Any]:
        only_local(request)
        done = await reload_all()
        if done.error:
            raise MalformedRequest(done.error)
        return {"version": done.version, "changed": done.changed, "review": done.review}


def described(policy: Policy) -> dict[str, Any]:
    """A policy as JSON: what its file and all that it extends say together."""
    return {
        "name": policy.name,
        "version": policy.version,
        "match": policy.match.model_dump(exclude_defaults=True) if policy.match else None,
        "percent": policy.percent,
        "filters": {name: repr(one) for name, one in policy.filters},
        "costs": {name: repr(term) for name, term in policy.costs},
        "picker": repr(policy.picker),
        "shadow": policy.shadow.policy if policy.shadow else None,
    }
