"""Implements the tensor interface of the shared calls for Paddle tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle import Tensor

from alltoallv import _core
from alltoallv._calls.adapters import Adapter
from alltoallv.paddle.tensors import allocate, check_tensor, core_name, from_block, region
from alltoallv.paddle.work import Done, Task
from alltoallv.quantization.feedback import ErrorFeedback


class _Tensors(Adapter[Tensor]):
    kind, tensor, feedback, handle = "a Paddle tensor", Tensor, ErrorFeedback, Task
    done, tracks_writes = Done, True

    def check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.stop_gradient and x.is_contiguous() else x.detach().contiguous()

    def address(self, x: Tensor) -> int:
        address: int = x.data_ptr()
        return address

    def writable(self, x: Tensor) -> bool:
        return bool(x.is_contiguous())

    name, region = staticmethod(core_name), staticmethod(region)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return allocate(shape, dtype)

    def new(self, shape: Sequence[int], like: Tensor, *, zero: bool = False) -> Tensor:
        return allocate(shape, like.dtype, zero=zero)

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Tensor) -> Tensor:
        return from_block(block, shape, like.dtype)

    def writes(self, x: Tensor) -> None:
        x._bump_inplace_version()  # a backward pass that needs the old values then raises an error

    def values(self, x: Tensor) -> Any:
        return x.astype("float32").numpy()


ADAPTER = _Tensors()
