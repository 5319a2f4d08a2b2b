"""Every public name of every front end, as help(), inspect.signature and tab completion show it."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from types import ModuleType

import pytest
from columns import RUNS

PARTS = {
    "numpy": ["alltoallv", "alltoallv.numpy", "alltoallv.testing"],
    "torch": ["alltoallv.torch", "alltoallv.torch.functional", "alltoallv.torch.nn", "alltoallv.deep_ep"],
    "mindspore": ["alltoallv.mindspore", "alltoallv.mindspore.distributed"],
    "paddle": ["alltoallv.paddle"],
}
MODULES = [importlib.import_module(name) for package in {column.package for column in RUNS} for name in PARTS[package]]
FRONT_ENDS = [module for module in MODULES if module.__name__ in {column.module for column in RUNS}]


def names(module: ModuleType) -> list[str]:
    made_there = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", made_there))


@pytest.mark.parametrize(
    ("module", "name"), [pytest.param(m, n, id=f"{m.__name__}.{n}") for m in MODULES for n in sorted(names(m))]
)
def test_a_public_name_explains_itself(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    assert name in dir(module)
    if not callable(value):  # a module, or a constant such as deep_ep.topk_idx_t
        return
    assert "alltoallv._" not in (inspect.getdoc(value) or "alltoallv._")  # nothing private is needed to understand it
    assert not re.search(r"(^|\.)_", value.__module__), value.__module__
    if not inspect.isclass(value):
        assert inspect.isfunction(value), type(value)
        signature = str(inspect.signature(value))
        assert not re.search(r"\b([A-Z]|_\w+)\b", signature), signature
        if module in FRONT_ENDS:
            assert value.__module__ == module.__name__


@pytest.mark.parametrize("module", FRONT_ENDS, ids=lambda m: m.__name__)
def test_tab_completion_offers_the_public_names_and_no_parts(module: ModuleType) -> None:
    assert {name for name in dir(module) if not name.startswith("_")} == set(names(module))


@pytest.mark.parametrize("module", FRONT_ENDS, ids=lambda m: m.__name__)
def test_functions_are_pickled_by_their_public_names(module: ModuleType) -> None:
    for value in map(vars(module).get, names(module)):
        if inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value
