"""Lowers Triton kernels for Ascend with triton-ascend and bishengir-compile, as far as that goes without CANN.

What is lowered is what `alltoallv_triton.launch` launches: its calls are recorded instead of executed. Only the
final assembler, ``hivmc``, is part of CANN; up to there the compiler tiles, plans the unified buffer and synchronizes.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascendnpuir
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, _parse_linalg_metadata, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from alltoallv_triton import launch

COMPILER = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile"
UNIFIED_BUFFER = 192 * 1024  # bytes per vector core of an Ascend 910B
READ_AND_WRITTEN = ("error",)  # arguments of kernels
# The assembler that CANN brings, and what follows from its absence; every other diagnostic is a finding.
STOP = "Cannot find hivmc"
EXPECTED = (
    STOP,
    "Failed to run `hivmc --version`",
    "Failed to detect hivmc version",
    "External hivmc run fails",
    "Failed to run BiShengIR pipeline",
)
_HIDDEN = 2  # arguments before a kernel's own: lock and workspace
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, its arguments' types and the constants it is compiled for."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Lowered:
    """What the compiler says.

    Attributes:
        unified_buffer: Bytes that the plan takes; None where there is no plan.
        diagnostics: Everything but the missing assembler.
    """

    unified_buffer: int | None
    diagnostics: tuple[str, ...]


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are noted, not executed, with the tiles of an NPU."""
    noted: list[Launch] = []

    def note(kernel: Any, tiles: int, fit: launch.Tiling, *arguments: Any, **constants: Any) -> None:
        names = kernel.arg_names[: len(arguments)]
        types = [_TYPES[x.dtype] if isinstance(x, torch.Tensor) else "i32" for x in arguments]
        noted.append(Launch(kernel, tuple(zip(names, types, strict=True)), tuple(constants.items())))

    before, launch._launch = launch._launch, note
    tilings, launch.TILINGS = launch.TILINGS, launch.TILINGS | {"cpu": launch.TILINGS["npu"]}
    try:
        yield noted
    finally:
        launch._launch, launch.TILINGS = before, tilings


def to_linalg(one: Launch, target: str) -> str:
    """Triton IR, then linalg: what triton-ascend does."""
    backend = AscendBackend(GPUTarget("npu", target, 0))
    constants = dict(one.constants)
    signature = dict(one.signature) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=one.kernel, signature=signature, constants=constants)
    options = backend.parse_options({"enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = dict(options.__dict__)
    module = make_ttir(module, metadata, options)
    linalg = ttir_to_linalg(module, metadata, options, named_ops=True)
    text, _ = _parse_linalg_metadata(linalg, metadata)
    return str(text)


def lower(one: Launch, target: str) -> Lowered:
    """Up to the missing assembler."""
    try:
        linalg = to_linalg(one, target)
    except subprocess.CalledProcessError as error:
        return Lowered(None, tuple(error.stderr.decode(errors="replace").splitlines()[:5]))
    except triton.CompilationError as error:
        return Lowered(None, (str(error),))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.mlir").write_text(linalg)
        command = [
            str(COMPILER), f"{folder}/kernel.mlir", f"--target={target}", "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true", "--enable-auto-multi-buffer=true",
            f"--save-temps={folder}", "-o", f"{folder}/kernel",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        output = (done.stdout + done.stderr).splitlines()
        diagnostics = [line for line in output if re.search(r"error|warning|ERROR|WARNING", line)]
        found = tuple(line for line in diagnostics if not any(text in line for text in EXPECTED)) + read_back(
            one, linalg
        )
        if done.returncode <= 0 or not any(STOP in line for line in output):
            found += (f"the compiler ended with {done.returncode} before it asked for hivmc", *output[-5:])
        planned = Path(folder, "module.hivm.opt.mlir")
        if not planned.exists():
            return Lowered(None, found or ("no plan was written", *output[:5]))
        used, unread = planned_bytes(planned.read_text())
        return Lowered(used, found + unread)


def planned_bytes(plan: str) -> tuple[int, tuple[str, ...]]:
    """The end of the last buffer in the unified buffer, and lines about buffers that this function cannot read.

    A buffer has several addresses where the compiler doubles it to copy and compute at the same time.
    """
    end, unread = 0, []
    for line in plan.splitlines():
        if "pointer_cast" not in line or "address_space<ub>" not in line:
            continue
        found = re.search(
            r"pointer_cast\(([^)]*)\)[^:]*: memref<((?:\d+x)*)([a-z]+)(\d*), #hivm.address_space<ub>>", line
        )
        addresses = (
            [re.fullmatch(r"%c(\d+)_i64(?:_\d+)?", text.strip()) for text in found[1].split(",")] if found else []
        )
        bits = int(found[4] or 0) if found and found[3] in ("f", "bf", "i") else 0
        if not bits or not addresses or not all(addresses):
            unread.append(f"a buffer that is not understood: {line.strip()}")
            continue
        elements = 1
        for extent in found[2].split("x")[:-1]:
            elements *= int(extent)
        end = max([end, *(int(one[1]) + (elements * bits + 7) // 8 for one in addresses if one)])
    return end, tuple(unread)


def read_back(one: Launch, linalg: str) -> tuple[str, ...]:
    """Arguments that the kernel only writes, but its lowered form reads too: a mask became a read-modify-write.

    That would write back what neighbours have written meanwhile, and touch memory behind the tensor.
    """
    both = re.findall(r"%arg(\d+): memref<\?x\w+> {[^}]*tt.tensor_kind = 2", linalg)
    names = [one.signature[int(number) - _HIDDEN][0] for number in both]
    return tuple(f"{name} is read back" for name in names if name not in READ_AND_WRITTEN)
