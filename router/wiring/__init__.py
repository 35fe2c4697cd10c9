"""How do the parts become one program?

The only package that knows every class: `program.py` the router, `prompts.py` its tokenizers, `cluster.py` what it
shares with other replicas, `agent.py` the publisher.
"""

from router.wiring.agent import Agent
from router.wiring.program import Program, build
from router.wiring.prompts import LoadTokenizer

__all__ = ["Agent", "LoadTokenizer", "Program", "build"]
