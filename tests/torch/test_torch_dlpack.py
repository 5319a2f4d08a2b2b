"""What the extension takes torch's tensors to be is what the headers of torch's wheel say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

HEADER = Path(__file__).parents[2] / "op_host/runtime/abi/dlpack.h"


def program(ours: str) -> str:
    """A program that compiles if the declarations agree."""
    lines = ["#include <cstddef>", "#include <cstdint>", "#include <stddef.h>", "#include <stdint.h>"]
    lines += ["namespace theirs {", "#include <ATen/dlpack.h>", "}", ours.replace("#pragma once", "")]
    lines.append("static_assert(kDLCPU == theirs::kDLCPU && kDLComplex == theirs::kDLComplex);")
    structs = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", ours, re.M | re.S))
    assert {"DLTensor", "DLManagedTensorVersioned", "DLPackExchangeAPI"} <= structs.keys()
    for name, body in structs.items():
        lines.append(f'static_assert(sizeof(::{name}) == sizeof(theirs::{name}), "size of {name}");')
        for field in re.findall(r"(\w+)(?=[,;]|\)\()", re.sub(r"\([^*].*?\);", "(", re.sub(r"///.*", "", body))):
            same = f"offsetof(::{name}, {field}) == offsetof(theirs::{name}, {field})"
            lines.append(f'static_assert({same}, "{name}.{field}");')
    return "\n".join(lines)


def compiled(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "abi.cpp"
    source.write_text(text)
    folders = [f"-I{path}" for path in include_paths()]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-w", "-fsyntax-only", *folders, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_declarations_are_the_wheels(tmp_path: Path) -> None:
    result = compiled(program(HEADER.read_text()), tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_tensor_type_carries_the_functions() -> None:
    assert "dlpack_exchange_api" in repr(torch.Tensor.__dict__["__dlpack_c_exchange_api__"])
