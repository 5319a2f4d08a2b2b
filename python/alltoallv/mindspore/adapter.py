"""MindSpore tensors for what takes tensors of any framework; ``place`` says where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor

from alltoallv._calls.adapters import Adapter
from alltoallv._calls.regions import Region
from alltoallv.mindspore.calls import Place
from alltoallv.mindspore.tensors import as_input, check_tensor, core_name, empty, region, settle
from alltoallv.mindspore.work import CommHandle
from alltoallv.quantization.feedback import ErrorFeedback


class Tensors(Adapter[Tensor]):
    kind, tensor, feedback, handle = "a MindSpore tensor", Tensor, ErrorFeedback, CommHandle

    def __init__(self, place: Place = region) -> None:
        self._place = place

    def check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)
        core_name(x.dtype)
        if self._place is region:
            settle()  # it may be an output, which MindSpore still has to write

    def contiguous(self, x: Tensor) -> Tensor:
        return as_input(x)

    def writable(self, x: Tensor) -> bool:
        return bool(x.is_contiguous())

    def region(self, x: Tensor) -> Region:
        return self._place(x)

    name = staticmethod(core_name)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return empty(shape, getattr(mindspore, dtype))

    def values(self, x: Tensor) -> Any:
        return x.astype(mindspore.float32).asnumpy()


ADAPTER = Tensors()
