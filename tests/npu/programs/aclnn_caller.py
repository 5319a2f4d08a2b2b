"""Calls aclnn operators as EXEC_NPU_CMD does: names found by torch_npu's own function, tensors of torch_npu."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch_npu
from torch import Tensor

ACL_FLOAT, ACL_INT8, ACL_FORMAT_ND = 0, 2, 2
DTYPES = {torch.float32: ACL_FLOAT, torch.int8: ACL_INT8}
library = ctypes.CDLL(str(Path(torch_npu.__file__).parent / "lib/libtorch_npu.so"))
address = library["_Z16GetOpApiFuncAddrPKc"]
address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]


def function(name: str, restype=ctypes.c_int):
    found = address(name.encode())
    assert found, f"torch_npu does not find {name}"
    return ctypes.CFUNCTYPE(restype)(found)


def acl_tensor(x: Tensor) -> ctypes.c_void_p:
    shape, strides = ((ctypes.c_int64 * x.dim())(*values) for values in (x.shape, x.stride()))
    rank, offset = ctypes.c_uint64(x.dim()), ctypes.c_int64(0)
    data, dtype = ctypes.c_void_p(x.data_ptr()), DTYPES[x.dtype]
    create = function("aclCreateTensor", ctypes.c_void_p)
    return ctypes.c_void_p(create(shape, rank, dtype, strides, offset, ACL_FORMAT_ND, shape, rank, data))


def call(name: str, *arguments) -> None:
    converted = [acl_tensor(a) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in arguments]
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    status = function(f"{name}GetWorkspaceSize")(*converted, ctypes.byref(size), ctypes.byref(executor))
    assert status == 0, status
    workspace = torch.empty(size.value, dtype=torch.uint8, device="npu")
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    status = function(name)(ctypes.c_void_p(workspace.data_ptr()), size, executor, stream)
    assert status == 0, status


x = torch.linspace(-3, 5, 300).npu() * 2  # what is queued before comes first
codes, scales = torch.empty(300, dtype=torch.int8, device="npu"), torch.empty(3, device="npu")
call("aclnnAlltoallvQuantize", x, 8, 128, codes, scales)
out = torch.empty(300, device="npu")
call("aclnnAlltoallvDequantizeSum", codes.expand(2, 300).contiguous(), scales.expand(2, 3).contiguous(), 8, 128, out)
expected = 2 * codes.cpu().float() * scales.cpu().repeat_interleave(128)[:300]
assert torch.equal(out.cpu(), expected)
assert (out.cpu() / 2 - x.cpu()).abs().max() <= 0.51 * scales.cpu().max()
assert codes.cpu().abs().max() == 127
print("right")
