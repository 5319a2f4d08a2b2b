"""The clients, by the module that a program needs: the program, and how many ranks it runs on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = {
    "accelerate": ("accelerate_weights.py", 2),
    "torch": ("torch_uneven.py", 3),
    "torchtitan": ("torchtitan_moe.py", 3),
    "transformers": ("transformers_experts.py", 2),
    "trl": ("trl_rewards.py", 2),
    "verl": ("verl_weights.py", 3),
}


def found() -> list[str]:
    """Returns the clients whose modules are installed."""
    specs = {name: importlib.util.find_spec(name) for name in PROGRAMS}
    # A folder may have a module's name: such a spec has no origin.
    return [name for name, spec in specs.items() if spec is not None and spec.origin is not None]
