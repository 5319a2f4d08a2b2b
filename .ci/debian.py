"""What checks need of Debian; ``python .ci/debian.py`` says in one line what is left out without it.

Packages are installed where it was asked for: in CI, and with APT=1 (``make test APT=1``), as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """Commands, the packages that bring them, and the checks that need them."""

    checks: str
    commands: tuple[str, ...]
    packages: tuple[str, ...]

    def missing(self) -> bool:
        """Whether a command is not here, after installing what may be installed."""
        _install([self])
        return not self._here()

    def reason(self) -> str:
        """Why the checks are left out, and how to have them."""
        return f"{self.checks}: needs the Debian packages {' '.join(self.packages)} ({HOW})"

    def _here(self) -> bool:
        return all(map(shutil.which, self.commands))


HOW = "APT=1 installs them, as root"
HOSTS = Need("tests of several hosts", ("ip", "tc", "nsenter"), ("iproute2", "util-linux"))
AARCH64 = Need(
    "kernels of aarch64",
    ("aarch64-linux-gnu-g++", "qemu-aarch64"),
    ("g++-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"),
)
MODEL = Need("the model of the row protocol", ("spin",), ("spin",))
FUZZ = Need("fuzzing of the bootstrap", ("clang++",), ("clang", "llvm", "libclang-rt-14-dev"))
OF_MAKE_TEST = (HOSTS, AARCH64, MODEL)


def _install(needs: list[Need]) -> None:
    packages = [package for need in needs if not need._here() for package in need.packages]
    asked = os.environ.get("CI") or os.environ.get("APT")
    if packages and asked and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-qq", "--no-install-recommends", *packages], check=True)


def main() -> None:
    """Of `make test`: installs where it was asked for, with ``--install``; else describes what is left out."""
    if sys.argv[1:] == ["--install"]:
        _install(list(OF_MAKE_TEST))
    elif left := [need for need in OF_MAKE_TEST if not need._here()]:
        packages = " ".join(package for need in left for package in need.packages)
        print(f"left out: {', '.join(need.checks for need in left)}; they need the Debian packages {packages} ({HOW})")


if __name__ == "__main__":
    main()
