"""One AllToAllV operator with one meaning on Ascend NPU, NVIDIA GPU and CPU.

The front ends are modules of their own, such as ``alltoallv.numpy``. No framework is imported here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alltoallv.atb.operations import AllToAllVOperation as AllToAllVOperation
    from alltoallv.atb.operations import QuantAllReduceOperation as QuantAllReduceOperation
    from alltoallv.atb.params import AllToAllVParam as AllToAllVParam
    from alltoallv.atb.params import CommMode as CommMode
    from alltoallv.atb.params import QuantAllReduceParam as QuantAllReduceParam
    from alltoallv.atb.params import QuantType as QuantType
    from alltoallv.communicator import Communicator as Communicator
    from alltoallv.memory import empty as empty
    from alltoallv.tracing import trace as trace

__version__ = "0.1.0"

# Loaded at first use, so that the command line and the launcher start without the extension.
_HOMES = {
    "Communicator": "communicator",
    "empty": "memory",
    "trace": "tracing",
    "AllToAllVOperation": "atb.operations",
    "AllToAllVParam": "atb.params",
    "CommMode": "atb.params",
    "QuantAllReduceOperation": "atb.operations",
    "QuantAllReduceParam": "atb.params",
    "QuantType": "atb.params",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "_core":
        return _extension()
    if name not in _HOMES:
        raise _absent(__name__, name)
    value = getattr(import_module(f"alltoallv.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _absent(package: str, name: str) -> Exception:
    """The error of a package's ``__getattr__``, which names the module that has the name; no framework is imported."""
    from difflib import get_close_matches

    homes = []
    if not name.startswith("_") and find_spec(f"{package}.{name}") is None:  # a module may not be imported yet
        for module in ("numpy", "torch", "torch.nn", "mindspore", "mindspore.distributed", "paddle"):
            if f"alltoallv.{module.partition('.')[0]}" not in homes and name in _offered(f"alltoallv.{module}"):
                homes.append(f"alltoallv.{module}")
        homes += ["alltoallv"] if name in _HOMES else []
    where = ": it is in " + " and ".join(filter(None, [", ".join(homes[:-1]), *homes[-1:]])) if homes else ""
    meant = [] if homes or name.startswith("_") else get_close_matches(name, sys.modules[package].__all__, 1, 0.8)
    where += "".join(f": did you mean {match!r}?" for match in meant)
    if where and sys._getframe(2).f_code.co_name == "_handle_fromlist":  # `from` drops an AttributeError
        return ImportError(f"cannot import name {name!r} from {package!r}{where}", name=package)
    return AttributeError(f"module {package!r} has no attribute {name!r}{where}", name=name)


def _offered(module: str) -> list[str]:
    """A module's ``__all__``, read from its source, since its framework may not be here."""
    import re

    path = Path(__file__).parent.parent / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    own = re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r'"(\w+)"', own[1]) if own else []
    return names + [
        name for part in re.findall(r"^from (\S+) import \*", text, re.MULTILINE) for name in _offered(part)
    ]


def _extension() -> Any:
    """The compiled part, which every use of the package begins with."""
    try:
        return import_module("alltoallv._core")
    except ModuleNotFoundError as error:
        if error.name != "alltoallv._core":
            raise
        folder = Path(__file__).parent
        others = ", ".join(sorted(file.name for file in folder.glob("_core.*.so")))
        state = f"has only {others}, of other Pythons" if others else "has none"
        message = (
            f"alltoallv's compiled part is missing: {folder} {state}. Install it with 'pip install .' or "
            "'pip install -e .' in the repository, or compile it into the working tree with 'make build'"
        )
        raise ImportError(message, name="alltoallv._core", path=str(folder)) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
