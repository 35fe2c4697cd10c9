"""A cluster to try the chart by hand, as a new user finds it: namespace `default`, with engines labelled app=vllm.

    python -m tests.live_k8s [ENGINES]

Runs until Ctrl-C. Prints what to paste into another terminal, where the commands of the README then work: `helm`, a
copy of the chart for this older API server, and http://127.0.0.1:8080 in place of `kubectl port-forward`.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helm.charts import helm_binary
from tests.live_k8s.api_server import APPS, CORE, ApiServer, checked, running
from tests.live_k8s.cut_proxy import Address, CutProxy
from tests.live_k8s.fake_node import FakeNode
from tests.live_k8s.release import copy_chart, engines_of_others

NAMESPACE = "default"
SERVICE = "127.0.0.2", 80
HELM = """#!/bin/sh
# The API server is too old for server-side apply of today's objects.
case $1 in
  install|upgrade) exec {helm} "$@" --server-side=false ;;
  *) exec {helm} "$@" ;;
esac
"""


def write_tools(folder: Path) -> None:
    """`helm` in a folder of its own, and the chart under the name that it has in the repository."""
    tool = folder / "bin" / "helm"
    tool.parent.mkdir()
    tool.write_text(HELM.format(helm=shlex.quote(str(helm_binary()))))
    tool.chmod(0o755)
    copy_chart(folder / "helm")


def create_engines(server: ApiServer, engines: int) -> None:
    with server.client() as client:
        for kind, body in engines_of_others(engines).items():
            root = APPS if kind == "deployments" else CORE
            checked(client.post(f"{root}/namespaces/{NAMESPACE}/{kind}", json=body))


async def serve(server: ApiServer, folder: Path, engines: int) -> None:
    async with FakeNode(server, NAMESPACE, ("127.0.0.1", server.port), folder / "pods") as node:
        create_engines(server, engines)
        turns = count()

        def router() -> Address | None:
            ready = [one.container.address for one in node.pods("router") if one.ready]
            return (ready[next(turns) % len(ready)], 8080) if ready else None

        node.service_address, forwarded, service = SERVICE[0], CutProxy(router), CutProxy(router)
        await forwarded.start(port=8080)
        await service.start(*SERVICE)
        while True:
            node.check()
            await asyncio.sleep(1)


def main(engines: int = 2) -> None:
    with TemporaryDirectory(prefix="warmroute-k8s-") as name, running(Path(name)) as server:
        folder = Path(name)
        write_tools(folder)
        paste = [
            f"export KUBECONFIG={shlex.quote(str(server.write_kubeconfig()))}",
            f"export PATH={shlex.quote(str(folder / 'bin'))}:$PATH",
            f"cd {shlex.quote(name)}",
        ]
        print("\n".join(paste), flush=True)
        asyncio.run(serve(server, folder, engines))


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except KeyboardInterrupt:
        pass
