"""What does it take to teach the router a new price, or a new preference?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TERM = '''"""What does it cost to send work over there?"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side


class Distance(CostTerm):
    """distance = far_ms on pods whose zone is not `home`."""

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    home: str = "here"
    far_ms: NonNegativeFloat = 5.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [0.0 if at.pod.zone == self.home else self.far_ms for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("pod is far", "0 or 1", at.pod.zone != self.home)
'''
PRICES = """
from io import StringIO
from rich.console import Console
from router.cli.explain_command import page
from router.observe.ended import RecordedDecision
from router.observe.receipts import explained
from router.policy.decide import decide, expected_ttft_ms
from router.policy.recording import record
from helm.policy_pages import reference_page, schema_page
from tests.kit.scenes import pod, policy, ready, scene

by = policy(costs={"queue": {}, "distance": {"far_ms": 7}})
seen = scene(*ready(pod("a", zone="there"), pod("b", zone="here")))
found = decide(seen, by)
print([(one.pod.id, dict(one.cost.parts)["distance"], expected_ttft_ms(one.cost)) for one in found.candidates])
assert "What does it cost to send work over there?" in reference_page()
assert '"far_ms"' in schema_page()
console = Console(width=100, file=StringIO())
console.print(page(explained(RecordedDecision.of(record(seen), found, by, 0.0)), formulas=True))
lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
assert "distance, ms 0.00 7.00" in lines
assert "= until first token, ms 0.00 7.00" in lines
assert "pod is far, 0 or 1 0 1" in lines
assert "distance distance = far_ms on pods whose zone is not `home`." in lines
assert "home here, far_ms 7" in lines
"""
FILTER = '''from router.policy.term import Filter
from router.types import PodStatus


class Even(Filter):
    """Keeps the pods whose name ends in an even digit."""

    def keeps(self, status: PodStatus) -> bool:
        return int(status.pod.id[-1]) % 2 == 0
'''
FILTERS = """
from router.policy.decide import decide
from helm.policy_pages import reference_page, schema_page
from tests.kit.scenes import pod, policy, ready, scene

found = decide(scene(*ready(pod("a1"), pod("a2"))), policy("queue", filters={"even": {}}))
print([one.pod.id for one in found.candidates])
assert "Keeps the pods whose name ends in an even digit." in reference_page() and '"even"' in schema_page()
"""


def learnt(tree: Path, file: str, text: str, table: str, line: str, then: str) -> str:
    """What `then` prints in a copy of the tree that has one file more; the catalog has its import and a line."""
    for folder in ("router", "policies", "config"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "loadtest" / "simulated_peers", tree / "loadtest" / "simulated_peers")
    for file_of_tests in ("helm/policy_pages.py", "tests/kit/scenes.py"):
        (tree / file_of_tests).parent.mkdir(parents=True)
        shutil.copy(ROOT / file_of_tests, tree / file_of_tests)
    (tree / "router" / "policy" / file).write_text(text)
    catalog = tree / "router" / "policy" / "catalog.py"
    lines = catalog.read_text().splitlines()
    begin = next(at for at, row in enumerate(lines) if row.startswith(table))
    lines.insert(begin + 1, line)
    package = ".".join(["router.policy", *Path(file).parts[:-1]])
    lines.insert(lines.index("from collections.abc import Mapping") + 1, f"from {package} import {Path(file).stem}")
    catalog.write_text("\n".join(lines))
    ran = subprocess.run([sys.executable, "-c", then], cwd=tree, env={"PYTHONPATH": str(tree)},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert ran.stderr == ""
    return ran.stdout.strip()


def test_a_new_cost_term_is_one_file_and_one_line_of_the_catalog(tmp_path: Path) -> None:
    """Policies can price by it; the expected time to first token, the explanation, the reference page and the schema
    have it, too."""
    line = '    "distance": distance.Distance,'
    assert learnt(tmp_path, "costs/distance.py", TERM, "COSTS", line, PRICES) == "[('b', 0.0, 0.0), ('a', 7.0, 7.0)]"


def test_a_new_filter_is_one_file_and_one_line_of_the_catalog(tmp_path: Path) -> None:
    """Policies can leave pods out by it; the reference page and the schema have it, too."""
    line = '    "even": even.Even,'
    assert learnt(tmp_path, "even.py", FILTER, "FILTERS", line, FILTERS) == "['a2']"
