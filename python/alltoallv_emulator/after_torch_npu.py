"""Installs the operators as soon as torch_npu has been imported, by an entry in front of ``sys.meta_path``.

And the backend of Triton, as soon as Triton looks for one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from alltoallv_emulator import PACKAGES

__all__ = ["watch"]


def watch() -> None:
    """Installs the hook in this process. A second call does nothing."""
    if not any(isinstance(finder, _AfterTorchNpu) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorchNpu())
        atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Only where Triton is: it would list the objects that Python does not free. Visiting all takes a second or two."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()


_VLLM = "vllm_ascend.vllm_ascend_C"
_TORCHAIR = {f"torchair.core._{name}" for name in ("abi_compat_ge_apis", "npu_graph_executor", "npu_utils", "torchair")}
_CANN = {
    f"triton.language.extra.cann{name}": f"cann/{file}.py"
    for name, file in (("", "__init__"), (".extension", "extension"), (".libdevice", "libdevice"))
}


class _AfterTorchNpu(MetaPathFinder):
    """Finds torch_npu and Triton's backends as usual, and installs what the emulator has once they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in PACKAGES and name in os.environ.get("ALLTOALLV_EMULATOR_WITH", "").split():
            folder = Path(__file__).with_name(name)
            return PathFinder.find_spec(name, path, target) or spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        if name not in ("torch", "torch_npu", "triton.backends", _VLLM, *_CANN, *_TORCHAIR):
            return None
        if name in _TORCHAIR:  # its own need CANN
            return spec_from_file_location(name, Path(__file__).with_name("torchair_core.py"))
        if name == "torch_npu":
            _check_build()
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and name in _CANN and find_spec("triton.backends.ascend") is None:  # not triton-ascend's
            file = Path(__file__).resolve().parent / "triton" / _CANN[name]
            return spec_from_file_location(
                name, file, submodule_search_locations=[] if file.stem == "__init__" else None
            )
        if name == _VLLM:  # vllm-ascend's own needs CANN
            return spec or spec_from_file_location(name, Path(__file__).with_name("vllm_ascend_c.py"))
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _check_build() -> None:
    """Raises ImportError where torch_npu would abort the process: it and a CUDA build define settings of one name."""
    torch = PathFinder.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return
    release = version("torch_npu")
    if release.startswith(("2.10.0.post7", "2.12.", "2.13.", "2.14.")):
        cpu = f"pip install torch=={release.partition('.post')[0]} --index-url https://download.pytorch.org/whl/cpu"
        raise ImportError(f"torch_npu {release} aborts beside a CUDA build of torch, expected the CPU build: `{cpu}`")


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _no_collection():
            self._loader.exec_module(module)
            if module.__name__ == "torch_npu":
                from alltoallv_emulator import aten

                aten.install()
            elif module.__name__ == "triton.backends":
                from alltoallv_emulator.triton import backend

                backend.install(module)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turns garbage collection off during imports: it would take a quarter of a short program's time for nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
