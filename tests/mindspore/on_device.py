"""Moves over HCCL whose tensors lie in the memory of an emulated NPU: MindSpore's are copied there and back."""

from __future__ import annotations

import ctypes
from typing import Any

from mindspore import Tensor

from alltoallv.mindspore.device_quantized import plan_of

acl = ctypes.CDLL("libascendcl.so")


class OnDevice:
    """A plan over HCCL of the device's memory, for tensors of a given number of bytes in the host's."""

    def __init__(self, device: int, plan: Any, *sizes: int) -> None:
        self.device, self.plan, self.sizes = device, plan, sizes

    def run(self, input: int, output: int, timeout: float = -1.0, stream: int = 0) -> None:
        assert acl.aclrtSetDevice(self.device) == 0  # MindSpore's thread has none
        places = [ctypes.c_void_p() for _ in self.sizes]
        for place, size in zip(places, self.sizes, strict=True):
            assert acl.aclrtMalloc(ctypes.byref(place), ctypes.c_size_t(size), 0) == 0
        read, written = map(ctypes.c_size_t, self.sizes)
        assert acl.aclrtMemcpy(places[0], read, ctypes.c_void_p(input), read, 1) == 0
        self.plan.run(places[0].value, places[1].value, timeout, stream)
        assert acl.aclrtMemcpy(ctypes.c_void_p(output), written, places[1], written, 2) == 0
        assert all(acl.aclrtFree(place) == 0 for place in places)


def on_device(group: Any, operator: str, dtype: Any, sends: list[int], recvs: list[int], digest: int) -> OnDevice:
    """In place of `plan_of`."""
    sent = sends[0] if operator == "all_gather" else sum(sends)
    sizes = [max(count, 1) * Tensor([0], dtype).itemsize for count in (sent, sum(recvs))]
    return OnDevice(group.rank, plan_of(group, operator, dtype, sends, recvs, digest), *sizes)
