"""MindSpore tensors for what takes tensors of any framework."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore
from mindspore import Tensor

from alltoallv._calls.adapters import Adapter
from alltoallv._calls.regions import Region
from alltoallv.mindspore.quantized import ErrorFeedback
from alltoallv.mindspore.tensors import as_input, core_name, empty, region, settle


class _Tensors(Adapter[Tensor]):
    kind, tensor, feedback = "a MindSpore tensor", Tensor, ErrorFeedback

    def check(self, name: str, x: Tensor) -> None:
        core_name(x.dtype)
        settle()  # it may be an output, which MindSpore still has to write

    def contiguous(self, x: Tensor) -> Tensor:
        return as_input(x)

    def writable(self, x: Tensor) -> bool:
        return bool(x.is_contiguous())

    def dtype(self, x: Tensor) -> str:
        return core_name(x.dtype)

    def region(self, x: Tensor) -> Region:
        return region(x)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return empty(shape, getattr(mindspore, dtype))


ADAPTER = _Tensors()
