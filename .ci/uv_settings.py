"""Lets uv take packages from where pip is told to take them: uv does not read pip's settings.

As a program it prints them for a shell.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

# pip's name, uv's variable, and what divides several values there.
SETTINGS = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("constraint", "UV_CONSTRAINT", " "),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
)


def variables() -> dict[str, str]:
    """Environment variables for uv; those that are set already stay."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()
    given = {}
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # the environment comes last and wins
        name, _, value = line.partition("=")
        given[name.rpartition(".")[2]] = ast.literal_eval(value)
    made = {variable: divider.join(given[name].split()) for name, variable, divider in SETTINGS if name in given}
    made["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version of all indexes
    return {name: value for name, value in made.items() if name not in os.environ}


if __name__ == "__main__":
    for name, value in variables().items():
        print(f"export {name}={shlex.quote(value)}")
