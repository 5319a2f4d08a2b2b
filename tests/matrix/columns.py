"""All columns, and those that this session runs."""

from __future__ import annotations

import importlib

from column import Column

COLUMNS: list[type[Column]] = [
    getattr(importlib.import_module(f"adapters.{name}_column"), f"{name.capitalize()}Column")
    for name in ("numpy", "torch", "c10d", "mindspore", "paddle")
]
FRAMEWORKS = [column for column in COLUMNS if column.package != "numpy" and column.installed()]
# A framework's session runs its columns, and the core's, where there is none, NumPy's.
RUNS = FRAMEWORKS or COLUMNS[:1]
