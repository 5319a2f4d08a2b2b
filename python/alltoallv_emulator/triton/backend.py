"""Triton's backend for emulated NPUs: its compiler ends with Triton's IR, which the launcher runs as a program.

A launch is an operator of torch on the tensors that the kernel is given, so it waits for the current stream as other
operators do, and an NPUGraph records it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint32
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase

from alltoallv_emulator import pyacl
from alltoallv_emulator.pyacl import Result

__all__ = ["install"]

_UNIFIED_BUFFER = 192 * 1024  # bytes of a vector core
_binary = "npubin"


@dataclass(frozen=True)
class Options:
    """What a launch may ask of the compiler, with triton-ascend's names; nothing but ``debug`` changes a result."""

    debug: bool = False
    sanitize_overflow: bool = False
    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 1
    warp_size: int = 32
    cluster_dims: tuple[int, ...] = (1, 1, 1)
    enable_fp_fusion: bool = False
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    maxnreg: int | None = None
    extern_libs: Any = None
    arch: str | None = None
    backend_name: str = "npu"
    ir_override: str | None = None
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "hf32", "tf32", "tf32x3")
    max_num_imprecise_acc_default: int = 0
    multibuffer: bool = True
    unit_flag: bool | None = None
    sync_solver: bool | None = None
    inject_barrier_all: bool | None = None
    inject_block_all: bool | None = None
    enable_linearize: bool = False
    enable_nd2nz_on_vector: bool = False
    enable_auto_bind_sub_block: bool = True
    enable_select_analysis: bool = False
    enable_hivm_auto_cv_balance: bool | None = None
    limit_auto_multi_buffer_only_for_local_buffer: bool | None = None
    limit_auto_multi_buffer_of_local_buffer: str | None = None
    set_workspace_multibuffer: int | None = None
    tile_mix_vector_loop: int | None = None
    tile_mix_cube_loop: int | None = None
    disable_auto_inject_block_sync: bool | None = None
    compile_mode: str = "simd"
    parallel_mode: str = "simd"
    force_simt_only: bool = False
    force_simt_template: bool = False

    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()


def _finish(module: Any, metadata: dict[str, Any]) -> bytes:
    """Gives the compiler's result, and what the launcher asks of it."""
    text = getattr(module, "str_nodebug", module.__str__)()
    metadata.update(shared=0, name=re.findall(r"tt\.func public @([\w$.]+)", text)[0], mix_mode="aiv")
    return bytes(text, "utf-8")


def _to_ttir(module: Any, metadata: dict[str, Any], *more: str) -> Any:
    manager = ir.pass_manager(module.context)
    for add in ("inliner", "canonicalizer", "cse", "symbol_dce"):
        getattr(passes.common, f"add_{add}")(manager)
    manager.run(module, *more)
    return module


class Backend(BaseBackend):
    """The compiler where the package `triton` is the one that all platforms share."""

    binary_ext = _binary

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "npu")

    def hash(self) -> str:
        return f"emulated-{self.target.arch}"

    def parse_options(self, options: dict[str, Any]) -> Options:
        fields = {name: value for name, value in options.items() if name in Options.__dataclass_fields__}
        return Options(**({"arch": self.target.arch} | {n: v for n, v in fields.items() if v is not None}))

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        stages["ttir"] = lambda module, metadata: _to_ttir(module, metadata, "make_ttir")
        stages[_binary] = _finish

    def load_dialects(self, context: Any) -> None:
        pass

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra.cann import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata


def _over(compiler: Any) -> type:
    """Makes triton-ascend's own compiler end where ours does: what follows asks for CANN."""

    class AscendBackend(compiler):  # type: ignore[misc]
        def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
            stages["ttir"] = _to_ttir
            stages[_binary] = _finish

        def hash(self) -> str:
            return f"emulated-{self.target.arch}"  # so that a device never gets what is made here

        def pack_metadata(self, metadata: Any) -> Any:
            return metadata

        binary_ext = _binary

    return AscendBackend


class _Utils:
    """What Triton and its programs ask about a device, and how a compiled kernel becomes one that runs."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        ask = pyacl.function("aclGetDeviceCapability", c_uint32, c_int, Result(c_int64))
        (cubes, code), (vectors, _) = (ask(device, info) for info in (0, 1))
        if code:
            raise RuntimeError(f"device is {device!r}, expected the number of an NPU")
        return {
            "max_shared_mem": _UNIFIED_BUFFER, "multiprocessor_count": cubes, "num_aicore": cubes,
            "num_vectorcore": vectors,
        }  # fmt: skip

    def get_arch(self) -> str:
        return _arch()

    def get_aicore_num(self) -> int:
        return self.get_device_properties(0)["num_aicore"]

    def get_aivector_core_num(self) -> int:
        return self.get_device_properties(0)["num_vectorcore"]

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        from alltoallv_emulator.triton.program import Program

        most_threads = () if _is_ascends_own() else (1 << 30,)
        return None, Program(kernel.decode()), 0, 0, *most_threads  # no registers, no spills

    def unload_module(self, module: Any) -> None:
        pass


@functools.cache
def _is_ascends_own() -> bool:
    """True if the package `triton` is triton-ascend's."""
    return find_spec("triton.backends.ascend") is not None


@functools.cache
def _arch() -> str:
    name = pyacl.library().aclrtGetSocName
    name.restype = c_char_p
    return str(name().decode())


class Driver(DriverBase):
    """What `triton.runtime.driver.active` is."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = _Utils()
        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", _arch(), 0)

    def get_current_device(self) -> int:
        return int(self.get_device_interface().current_device())

    def set_current_device(self, device: int) -> None:
        self.get_device_interface().set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return int(self.get_device_interface().current_stream(device).npu_stream)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("npu", self.get_current_device())

    def get_device_interface(self) -> Any:
        import torch

        importlib.import_module("torch_npu")  # torch imports it by itself, unless it is told not to
        return torch.npu

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("map_python_to_cpp_type is not among what the emulator has: no launcher is compiled")

    def get_benchmarker(self) -> Callable[..., Any]:
        return _measure

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1, dtype=torch.int, device=self.get_active_torch_device())

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()


def _measure(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **options: Any) -> Any:
    """Returns the milliseconds of one call, as often as there are quantiles: the emulator says nothing of speed."""
    begin = time.perf_counter()
    call()
    took = 1000 * (time.perf_counter() - begin)
    return took if quantiles is None else [took] * len(quantiles)


class Launcher:
    """Launches a kernel: takes its arguments from the function's, and leaves out what it was compiled for."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = getattr(getattr(source, "fn", None), "__name__", metadata.name)
        names = getattr(getattr(source, "fn", None), "arg_names", [])
        by_index = {names.index(k) if isinstance(k, str) and k in names else k: v for k, v in source.signature.items()}
        left_out = {k[0] if isinstance(k, tuple) and len(k) == 1 else k for k in getattr(source, "constants", {})}
        left_out = {names.index(k) if isinstance(k, str) and k in names else k for k in left_out}
        self._kinds = [
            "constexpr" if index in left_out else by_index.get(index, "constexpr")
            for index in range(max([len(names), *[p + 1 for p in by_index if isinstance(p, int)]]))
        ]
        # Triton 3.2 leaves out what is declared as a constant, but not the values that it makes constants of (None, 1).
        self._declared = [self._kinds[index] for index in sorted(by_index)]

    def __call__(
        self, x: int, y: int, z: int, stream: int, program: Any, packed: Any, metadata: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        from alltoallv_emulator.triton import launches

        kinds = self._kinds if len(arguments) == len(self._kinds) else self._declared
        values = list(_given(kinds, arguments))
        if enter is not None:
            enter(metadata)
        if x * y * z > 0:
            launches.launch(self._name, program, (int(x), int(y), int(z)), values, stream)
        if leave is not None:
            leave(metadata)


def _given(kinds: Sequence[Any], arguments: Sequence[Any]) -> Iterator[Any]:
    """Yields the arguments that the compiled kernel has."""
    for kind, value in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _given(kind, value)
        elif str(kind).startswith("tensordesc"):
            yield from itertools.chain([value], value.shape, value.strides)
        elif kind != "constexpr":
            yield value


def install(backends: ModuleType) -> None:
    """Makes this the only backend of Triton."""
    ascend = backends.backends.get("ascend")
    compiler = Backend if ascend is None else _over(ascend.compiler)
    backends.backends.clear()
    backends.backends["ascend"] = backends.Backend(compiler=compiler, driver=Driver)
