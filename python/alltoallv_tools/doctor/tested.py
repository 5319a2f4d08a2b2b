"""Says on which versions the tests pass, of Python and of every package that a program brings.

pyproject.toml asks for a range that has them, noxfile.py installs them, docs/compatibility.md lists what ran when.
"""

from __future__ import annotations

# The first two numbers of a version count; the first version is the one that all tests run on.
TESTED = {
    "python": ("3.11", "3.10", "3.12", "3.13", "3.14"),
    "numpy": ("2.4", "1.26", "2.2", "2.5"),
    "torch": ("2.13", "2.10", "2.11", "2.12", "2.14", "2.15"),
    "torch_npu": ("2.13", "2.10"),
    "mindspore": ("2.10", "2.9"),
    "paddle": ("3.3",),
}


def state_of(name: str, version: str) -> str:
    """Returns "tested" or "untested", with what is tested; "" for what the table does not have."""
    if name not in TESTED or not version:
        return ""
    if ".".join(version.split(".")[:2]) in TESTED[name]:
        return "tested"
    releases = sorted(TESTED[name], key=lambda each: [int(part) for part in each.split(".")])
    return f"untested: the tests run on {', '.join(releases)}"
