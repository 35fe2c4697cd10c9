"""`warmroute pods`: lists the pods of a running router, adds and removes one, and drains and undrains one or more.

Added and removed pods are lost when the router restarts; the configuration file is the lasting place. With
`index.redis`, drains are of all routers, and stay.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from router.cli.admin_client import DEFAULT_URL, AdminClient, BearerOption, JsonOption, UrlOption, fail
from router.cli.terminal import folded_table, printable
from router.config.load import plain, read_document

_PodRow = dict[str, Any]


class PodAction(StrEnum):
    LIST = "list"
    ADD = "add"
    REMOVE = "remove"
    DRAIN = "drain"
    UNDRAIN = "undrain"


def pods_command(
    action: Annotated[PodAction, typer.Argument(help="What to do.")] = PodAction.LIST,
    pod: Annotated[
        str | None,
        typer.Argument(
            help="Id or URL; for `add` a URL, or a YAML file with an entry as under `pods` in router.yaml; for `drain` "
            "and `undrain` also labels: `rack=r12,zone=a`, of host, rack, zone, pool, hardware, engine and role.",
            show_default="all pods, for `list`",
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="Why pods are drained, for those who list them.", show_default="none")] = "",
    url: UrlOption = DEFAULT_URL,
    bearer_file: BearerOption = None,
    as_json: JsonOption = False,
) -> None:
    router = AdminClient(url, bearer_file)
    if action is PodAction.LIST:
        rows = _named(router, pod) if pod else _pods(router)
        if as_json:
            print(json.dumps(rows, indent=2))
        else:
            _print_pods(rows, {} if pod else router.ask("GET", "/admin/drains", dict[str, str], missing={}))
    elif pod is None:
        raise typer.BadParameter(f"`{action.value}` needs a pod: its id or URL; `warmroute pods` lists them")
    elif action is PodAction.ADD:
        added = router.ask("POST", "/admin/pods", _PodRow, _entry(pod))
        print(f"{added['url']}: {added['status']}")
    else:
        for name in [pod] if "=" in pod else [one["id"] for one in _named(router, pod)]:
            _change(router, action, name, why)


def _pods(router: AdminClient) -> list[_PodRow]:
    return router.ask("GET", "/admin/pods", list[_PodRow])


def _named(router: AdminClient, name: str) -> list[_PodRow]:
    """The pods with this id or URL: one, or all ranks of a data-parallel pod."""
    known = _pods(router)
    found = [one for one in known if name in (one["id"], one["url"])]
    if not found:
        fail(f"unknown pod {name!r}; known: {', '.join(one['id'] for one in known) or 'none'}")
    return found


def _entry(pod: str) -> Any:
    if pod.endswith((".yaml", ".yml")):
        return plain(read_document(Path(pod)).data)
    return {"url": pod}


def _change(router: AdminClient, action: PodAction, name: str, why: str) -> None:
    """Print the state of each pod; on stderr, which routers know of a drain."""
    path, by = f"/admin/pods/{quote(name, safe='')}", os.environ.get("USER", f"user {os.getuid()}")
    if action is PodAction.REMOVE:
        return print(f"{name}: {router.ask('DELETE', path, _PodRow)['status']}")
    found = router.ask("POST", f"{path}/{action.value}", _PodRow, {"by": by, "why": why})
    pods = found.get("pods", {name: found["status"]})  # routers of versions before name no pods
    for pod_id, state in pods.items():
        print(printable(f"{pod_id}: {state}"))
    what = "drain lifted" if action is PodAction.UNDRAIN else "drained"
    none = "" if pods else "; no pod has these labels now"
    return print(f"{name}: {what}{none}; known to {found.get('known_to', 'this router alone')}", file=sys.stderr)


def _print_pods(pods: Sequence[_PodRow], drains: Mapping[str, str]) -> None:
    """A table, then what is particular of pods, such as why they are unusable or serve without prefix matching, and the
    drains that no pod shows."""
    style = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = folded_table("pod", "state", "role", "matching", "models", numbers=("running", "waiting", "KV"), **style)
    for one in pods:
        models = ", ".join((*one["models"], *one["adapters"])) or "-"
        names = one["id"], one["state"], one["role"], one["matching"], models
        table.add_row(*map(printable, names), *_load(one))
    console = Console()
    console.print(table if pods else "no pods")
    shown = {one.get("state_reason") for one in pods}
    others = (f"drain {name}: {why}; for pods that come" for name, why in drains.items() if why not in shown)
    for line in (*_reasons(pods), *others):
        console.print(printable(line), soft_wrap=True)


def _load(one: _PodRow) -> tuple[str, str, str]:
    return str(one["running"]), str(one["waiting"]), f"{one['kv_usage']:.0%}"


def _reasons(pods: Sequence[_PodRow]) -> Iterator[str]:
    for one in pods:
        if reason := one.get("state_reason"):
            yield f"{one['id']}: {one['state']}: {reason}"
        if front_end := one.get("front_end"):
            yield f"{one['id']}: front end: {front_end}"
        if misreads := one.get("misreads"):
            yield f"{one['id']}: makes other prompts of chats with: {', '.join(misreads)}"
        if lacks := one.get("lacks"):
            yield f"{one['id']}: does not serve: {', '.join(lacks)}"
        if answers := one.get("answers"):
            yield f"{one['id']}: {answers}"
        if one.get("capacity_tokens", 0) is None and one["matching"] == "events":
            yield f"{one['id']}: KV capacity unknown until it evicts: the engine reports none; or set `capacity_tokens`"
        if one["matching_reason"]:
            yield f"{one['id']}: matching {one['matching']}: {one['matching_reason']}"
