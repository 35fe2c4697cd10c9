"""What does it take to teach the router a new price?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TERM = '''"""What does it cost to send work over there?"""

from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import Configurable, Placement, Side


class Distance(Configurable):
    """distance = far_ms on pods whose zone is not `home`."""

    side: ClassVar[Side] = Side.PREFILL
    home: str = "here"
    far_ms: NonNegativeFloat = 5.0

    def cost_ms(self, at: Placement) -> float:
        return 0.0 if at.pod.zone == self.home else self.far_ms
'''
DECIDES = """
from router.policy.decide import decide
from router.policy.reference import reference_page
from tests.policy.scenes import pod, policy, ready, scene

pods = ready(pod("a", zone="there"), pod("b", zone="here"))
found = decide(scene(*pods), policy("queue", costs={"queue": {}, "distance": {"far_ms": 7}}))
print([(one.pod.id, dict(one.cost.parts)["distance"]) for one in found.candidates])
assert "What does it cost to send work over there?" in reference_page()
"""


def test_a_new_cost_term_is_one_file_and_its_entry_in_the_catalog(tmp_path: Path) -> None:
    """In a copy of the tree: the file, the import and the row that name it, and policies can price by it; the
    reference page has it, too."""
    for folder in ("router", "policies", "config"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "tests" / "policy" / "scenes.py",):
        (tmp_path / "tests" / "policy").mkdir(parents=True)
        shutil.copy(file, tmp_path / "tests" / "policy")
    (tmp_path / "router" / "policy" / "costs" / "distance.py").write_text(TERM)
    catalog = tmp_path / "router" / "policy" / "catalog.py"
    lines = catalog.read_text().splitlines()
    row = next(at for at, line in enumerate(lines) if line.startswith("COSTS"))
    lines.insert(row + 1, '    "distance": Distance,')
    lines.insert(row, "from router.policy.costs.distance import Distance")
    catalog.write_text("\n".join(lines))
    ran = subprocess.run([sys.executable, "-c", DECIDES], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert ran.stderr == ""
    assert ran.stdout.strip() == "[('b', 0.0), ('a', 7.0)]"
