"""Checks what works on this machine and what is missing; ``python -m alltoallv doctor`` prints it.

`machine` asks the kernel, `software` looks for launchers, frameworks and devices, `selftest` exchanges data between
two processes. Nothing here needs the extension or imports a framework, so that it can say that they are broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "no", "-"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        section: the heading under which it is printed.
        name: what was looked at.
        status: "ok", "no" (it does not work and matters) or "-" (absent, or of no consequence).
        detail: what was found.
        advice: what to do about it, or "".
        required: True if the shm backend does not work without it.
    """

    section: str
    name: str
    status: Status
    detail: str
    advice: str = ""
    required: bool = False
