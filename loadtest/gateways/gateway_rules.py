"""Compares llm-d's rules with ours behind the same Envoy: cached share and TTFT of the same traffic.

    python -m loadtest.gateways.gateway_rules [--scenario chatbot] [--rate 4] [--seconds 15] [--seeds 1,2,3]

Both are policies of `warmroute picker`, so that they differ in the choice alone; llm-d's reads our exact index, to its
advantage. For each seed each policy gets new engines, with empty caches; the one that is first changes with the seed.
Needs `pip install 'warmroute[envoy]'`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

from ruamel.yaml import YAML

from loadtest.fleets.record import Record, judged, read_record
from loadtest.simulated_peers.peer_pickers import library_with_peers
from router.cli import main as warmroute
from router.config.policy_files import PolicyFolder, check
from router.policy.policy_set import PolicySet, policy_set
from tests.live_envoy.gateway import Gateway, picker_is_healthy, running_gateway, wait_for

POLICIES = ("cost_aware", "llm_d", "llm_d_weighted")


def serve_with_peers() -> None:
    """`warmroute picker`, which also knows the formulas of other routers."""

    def read(folder: PolicyFolder) -> PolicySet:
        library = library_with_peers(folder.folder)
        policies = {name: library.policy(name) for name in (*library.own, library.known(folder.default))}
        for name in policies:
            check(library, name, folder.classes)
        return policy_set(policies[folder.default], policies.values())

    PolicyFolder.read = read  # type: ignore[method-assign, assignment]
    warmroute()


def restarted(gateway: Gateway, policy: str) -> subprocess.Popen[bytes]:
    """A picker with this policy in place of the running one."""
    gateway.processes["picker"].kill()
    gateway.processes["picker"].wait()
    file = gateway.logs / "router.yaml"
    yaml = YAML(typ="safe")
    config = yaml.load(file) | {"policy": policy}
    with file.open("w") as out:
        yaml.dump(config, out)
    log = (gateway.logs / f"{policy}.log").open("wb")
    command = [sys.executable, "-m", "loadtest.gateways.gateway_rules", "picker", "--config", str(file)]
    return subprocess.Popen(command, stdout=log, stderr=log)


def run(policy: str, seed: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Cached share, and TTFT at the median and the 99th percentile in ms."""
    with running_gateway(engines=options.pods, time_scale=options.time_scale, log={"requests": False}) as gateway:
        process = restarted(gateway, policy)
        try:
            wait_for(lambda: not picker_is_healthy(gateway), "Envoy has not missed the first picker")
            wait_for(lambda: picker_is_healthy(gateway), gateway.log(policy)[-2000:])
            out = gateway.logs / "run.json"
            command = [sys.executable, "-m", "loadtest.fleets.run", options.scenario, "--url", gateway.url]
            command += ["--seed", str(seed)]
            command += ["--rate", str(options.rate), "--duration-s", str(options.seconds), "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return figures(read_record(out))
        finally:
            process.kill()
            process.wait()


def figures(record: Record) -> tuple[float, float, float]:
    [(_, found)] = judged(record)
    assert not found.errors, f"{found.errors} requests failed"
    return found.cached_share, found.ttft_p50_ms, found.ttft_p99_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="chatbot")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {policy: [] for policy in options.policies.split(",")}
    print("| seed | policy | cached | TTFT p50 ms | TTFT p99 ms |\n|---|---|---|---|---|")
    for number, seed in enumerate(map(int, options.seeds.split(","))):
        for policy in list(found)[:: -1 if number % 2 else 1]:
            cached, p50_ms, p99_ms = run(policy, seed, options)
            found[policy].append((cached, p50_ms, p99_ms))
            print(f"| {seed} | {policy} | {cached:.1%} | {p50_ms:.0f} | {p99_ms:.0f} |", flush=True)
    for policy, rows in found.items():
        cached, p50_ms, p99_ms = (median(column) for column in zip(*rows, strict=True))
        print(f"| all | {policy} | {cached:.1%} | {p50_ms:.0f} | {p99_ms:.0f} |")


if __name__ == "__main__":
    serve_with_peers() if sys.argv[1:2] == ["picker"] else main()
