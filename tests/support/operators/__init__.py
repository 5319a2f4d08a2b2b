"""The cases of all operators: a module for each family, as in alltoallv.npu_ops."""

from __future__ import annotations

import importlib
import pkgutil

from operator_case import Case


def families() -> dict[str, list[Case]]:
    """By the family's name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").CASES for name in modules}
