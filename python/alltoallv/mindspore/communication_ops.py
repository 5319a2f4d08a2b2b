"""``mindspore.ops.communication``: the functions of ``mint.distributed``, and a few more of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from alltoallv._calls.counts import share_of
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import distributed
from alltoallv.mindspore.comm_func import all_to_all_v_c
from alltoallv.mindspore.distributed import *  # noqa: F403
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.tensors import CommHandle, check_tensor

__all__ = [*distributed.__all__, "all_to_all_v_c", "gather_into_tensor", "scatter_tensor", "set_comm_ops_inplace"]


def gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, dst: int = 0, group: str | None = None, async_op: bool = False
) -> CommHandle | None:
    """Gathers all ranks' tensors along dimension 0 in ``output_tensor`` of rank ``dst`` of the job."""
    with guard(enter(group), "gather", TypeError):
        parts = _parts("output_tensor", output_tensor, group) if distributed.get_rank() == dst else []
    return distributed.gather(input_tensor, parts, dst, group, async_op)


def scatter_tensor(
    output_tensor: Tensor, input_tensor: Tensor, src: int = 0, group: str | None = None, async_op: bool = False
) -> CommHandle | None:
    """Splits the ``input_tensor`` of rank ``src`` of the job along dimension 0; rank j gets part j in its output."""
    with guard(enter(group), "scatter", TypeError):
        parts = _parts("input_tensor", input_tensor, group) if distributed.get_rank() == src else []
    return distributed.scatter(output_tensor, parts, src, group, async_op)


def _parts(name: str, tensor: Any, group: str | None) -> list[Tensor]:
    """Returns the ranks' parts of a tensor along dimension 0, in its memory."""
    check_tensor(name, tensor)
    size = enter(group).size
    return list(tensor.split(share_of(name, tensor.shape, size)))


def set_comm_ops_inplace(is_enable: bool, func_list: Sequence[str] | None = None) -> None:
    """Refuses False: the functions write into their outputs, as MindSpore's do by default."""
    if not isinstance(is_enable, bool):
        raise TypeError(f"is_enable is a {type(is_enable).__name__}, expected a bool")
    if not is_enable:
        raise InvalidParamError(
            "is_enable is False, expected True: mindspore.communication.comm_func has functions that return outputs",
            id=1323,
        )
