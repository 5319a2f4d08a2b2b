"""Reads Slurm's variables that have a notation of their own."""

from __future__ import annotations

import re

from alltoallv.errors import InvalidParamError


def tasks_of_node(text: str, node: int) -> int:
    """Returns the number of a step's tasks on one host.

    Args:
        text: SLURM_STEP_TASKS_PER_NODE: counts host by host, ``4(x2),3`` for 4, 4 and 3.
        node: SLURM_NODEID: the host's number in the step.

    Raises:
        InvalidParamError: the text is malformed, or lists too few hosts.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if found is None:
            raise InvalidParamError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected counts of tasks like '4(x2),3'")
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise InvalidParamError(f"SLURM_NODEID is {node}, expected less than {len(counts)}, the hosts of {text!r}")
    return counts[node]
