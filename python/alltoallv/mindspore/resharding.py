"""Moves tensors between layouts over the ranks, and exchanges one dimension for another; see `alltoallv.mindspore` for
what all functions have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.parallel import Layout as OwnLayout

from alltoallv._calls.exchanges import Sizes
from alltoallv._calls.layouts import Layout, read_layout
from alltoallv._calls.resharding_on_host import Autograd, HostPlan, reshard_on_host
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.mindspore.front_end import ADAPTER, apply, enter, front_end
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import in_queue, wants_gradient
from alltoallv.quantization.spec import Format, Quantization, traveling

__all__ = ["ReshardPlan", "all_to_all_nd", "heads_to_sequence", "reshard", "reshard_state", "sequence_to_heads"]


_AUTOGRAD = Autograd(wants_gradient, apply)


class ReshardPlan(HostPlan):
    """Moves tensors of one shape and dtype from a layout to another; made once, called for many.

    Making it is collective: the ranks compare what they ask for. See `reshard` for layouts.

    Args:
        shape, dtype: Of the whole tensor.
        source, target: Layouts.
        format, group_size: See `reshard`.
        group: A group's name, a `Communicator`, or None for all ranks.

    Attributes:
        source_shape, target_shape: Of this rank's parts; None where it has none.
        elements_sent, elements_received, bytes_sent, bytes_received: What this rank sends to others, and gets from
            them, in a call.

    Raises:
        InvalidParamError: a layout is no pair of a mesh and placements, or does not fit the shape.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        source: Any,
        target: Any,
        *,
        format: Format | None = None,
        group_size: int | None = None,
        group: Group = None,
    ) -> None:
        coding = partial(traveling, format, group_size)
        super().__init__(ADAPTER, _communicator(group), shape, dtype, source, target, coding, _layout, _AUTOGRAD)


def reshard(
    x: Tensor | None,
    source: Any,
    target: Any,
    *,
    shape: Sequence[int] | None = None,
    format: Format | None = None,
    group_size: int | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Moves a tensor from one layout over the ranks to another.

    A layout is MindSpore's own (``mindspore.parallel.Layout`` with a tensor map, or a dict of ``device_matrix``,
    ``tensor_map`` and ``rank_list``), or a pair ``(mesh, placements)``. The mesh is an array of ranks of any number of
    dimensions, each rank at most once. There is one placement for each dimension of the mesh:

    - an integer d: the ranks along it have parts of dimension d of the tensor, in order, of ceil(n / W) rows, the last
      ones smaller or empty. Two dimensions of the mesh may divide the same d, the first one before the second;
    - a pair (d, p): they have parts in strides: dimension d is cut into p pieces first, and each rank has its part of
      every piece;
    - None: the ranks along it have copies;
    - ``"sum"``, ``"avg"``, ``"min"``, ``"max"``, ``"prod"``: every rank along it has a term; the tensor is their
      reduction, in the order of the mesh, 16-bit floats in float32. In ``target`` only ``"sum"``: the first rank along
      it gets the values, the others zeros.

    The meshes may be of different, overlapping or disjoint ranks. Every byte that a rank lacks is sent to it once, from
    one of the ranks that have it, and none that it has. Terms are added up first, by one more exchange.

    Args:
        x: This rank's part of the source; None on a rank that is not in its mesh.
        source, target: Layouts, equal on all ranks.
        shape: Of the whole tensor. Default: what the parts make together.
        format: The format in which float32, float16 and bfloat16 elements travel, such as ``"int8"``; see
            docs/quantization.md. Each piece for a rank is one flat vector, quantized once by its sender. Elements that
            some rank lacks are rounded on all ranks, also where they stay, so that copies are equal; others keep their
            values, as do the other dtypes. Terms have no format. Gradients move as they are. Default: none.
        group_size: Elements that share a scale. Default: the format's, or 128.
        out: This rank's part, to be written: contiguous, of its shape and dtype, apart from ``x``. Not for what wants a
            gradient. Default: a new tensor.
        group: A group's name, a `Communicator`, or None for all ranks.
        async_op: Return a handle at once, whose ``result()`` waits and returns what is returned else. Layouts, shapes
            and dtypes are compared before; a `ReshardPlan` has done that already. Not for what wants a gradient.

    Returns:
        This rank's part of the target, ``out`` or a new tensor; None on a rank that is not in its mesh. In PyNative
        mode differentiable, to any order, where all ranks are in both meshes: the gradient moves back the same way, and
        gradients of copies are added. Second gradients need a part with elements on every rank, because MindSpore takes
        none of empty tensors.

    Raises:
        InvalidParamError, InvalidTensorError: a layout or a part of any rank is wrong.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    shapes = None if shape is None else {"x": shape}
    return _moved({"x": x}, source, target, shapes, partial(traveling, format, group_size), group, async_op, True, out)


def reshard_state(
    state: Mapping[str, Tensor | None],
    source: Any,
    target: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    format: Format | None = None,
    group_size: int | None = None,
    out: Mapping[str, Tensor | None] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Moves several tensors by name, up to 64 MiB of a dtype in one exchange; see `reshard`.

    Args:
        state: This rank's parts; the same names on all ranks, in the same order.
        source, target: A layout for all, or a dict of one for each name of ``state``.
        shapes: Of the whole tensors that have one here.
        format, group_size, group, async_op: See `reshard`.
        out: A dict of tensors to be written, by name, None where this rank has no part; see `reshard`.

    Returns:
        The parts of the target, by name. Those that want a gradient move one after the other.

    Raises:
        AllToAllVError: as `reshard`.
    """
    return _moved(state, source, target, shapes, partial(traveling, format, group_size), group, async_op, False, out)


def _moved(
    state: Mapping[str, Tensor | None],
    source: Any,
    target: Any,
    shapes: Mapping[str, Sequence[int]] | None,
    coding: Callable[[], Quantization | None],
    group: Group,
    async_op: bool,
    single: bool,
    out: Any,
) -> Any:
    return reshard_on_host(
        ADAPTER, _communicator(group), state, source, target, shapes, coding, async_op, _layout, single, _AUTOGRAD, out
    )


def _communicator(group: Group) -> Communicator:
    comm = enter(group)
    if in_queue():
        raise BackendUnavailableError("reshard moves tensors in host memory, expected the device target CPU", id=5043)
    return on_host(comm)


def _layout(name: str, value: Any, size: int) -> Layout:
    """Returns the layout, also of MindSpore's own, whose dimensions of the tensor name dimensions of the mesh."""
    layout = value
    if isinstance(value, OwnLayout):
        try:
            layout = value.to_dict()
        except ValueError as error:
            raise InvalidParamError(
                f"{name} is a layout without a tensor_map, expected one ({error})", id=1353
            ) from None
    if not isinstance(layout, Mapping):
        return read_layout(name, value, size)
    dims, tensor_map = layout["device_matrix"], layout["tensor_map"]
    if tensor_map is None or layout.get("interleaved_parallel"):
        raise InvalidParamError(
            f"{name} is {layout}, expected a layout with a tensor_map and without interleaved_parallel", id=1354
        )
    ranks = layout.get("rank_list") or range(int(np.prod(dims)))
    # Dimensions of the mesh are numbered from the last one; several may divide one of the tensor, in their order there.
    divided = [
        (len(dims) - 1 - each, dim)
        for dim, dividers in enumerate(tensor_map)
        for each in (dividers if isinstance(dividers, tuple | list) else (dividers,))
        if each >= 0
    ]
    used = [along for along, _ in divided]
    order = [*used, *(along for along in range(len(dims)) if along not in used)]
    placements = [dim for _, dim in divided] + [None] * (len(dims) - len(used))
    return read_layout(name, (np.reshape(ranks, dims).transpose(order), placements), size)


def all_to_all_nd(
    input: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: Group = None,
    *,
    scatter_sizes: Sizes = None,
    gather_sizes: Sizes = None,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges one dimension of a tensor for another: ranks that have parts of the one get parts of the other.

    For every rank r:

        out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, along scatter_dim)[r])

    What goes to a rank is copied from where it lies in the input to where it belongs in the output: nothing is permuted
    before or after. On Ascend HCCL moves the parts in one piece each: there they are copied
    before and after.

    Args:
        input: At least 2 dimensions, any dense dtype; equal on all ranks but for dimension ``gather_dim``.
            Copied first if it is not contiguous.
        scatter_dim, gather_dim: Two dimensions, the same on all ranks; below 0 they count from the last.
        group: A group's name, a `Communicator`, or None for all ranks.
        scatter_sizes: The lengths along ``scatter_dim`` that every rank gets, one per rank, or their sum. Default, and
            for a sum: ceil(n / W) each, the last ones smaller or empty, as `reshard` and DTensor divide.
        gather_sizes: The lengths along ``gather_dim`` that the ranks have, one per rank, or their sum, divided in the
            same way. Default: all have as much as this one.
        out: Where to receive: contiguous, of the result's shape and the input's dtype, apart from it in memory.
        async_op: Return ``(output, handle)`` at once.

    Returns:
        ``out`` if given, else a new tensor: the shape of ``input`` with ``scatter_sizes[r]`` and ``sum(gather_sizes)``
        along the two dimensions. Differentiable in PyNative mode, to any order.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about dimensions, sizes or dtype; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    return front_end.all_to_all_nd(input, scatter_dim, gather_dim, group, scatter_sizes, gather_sizes, out, async_op)


def sequence_to_heads(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges a part of the sequence with all heads for the whole sequence with a part of the heads.

    It is what attention needs whose tensors are divided along the sequence (Ulysses): `all_to_all_nd` with
    ``scatter_dim=heads_dim`` and ``gather_dim=sequence_dim``. `heads_to_sequence` brings the result back.

    Args:
        input: In the default order ``[batch, part of the sequence, heads, ...]``.
        group: A group's name, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: all are as long as this one.
        heads: How many heads every rank gets, one per rank, or their sum. Default: ceil(heads / W), the last ones fewer
            or none.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, sequence, part of the heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": heads, "gather_sizes": sequence}
    return all_to_all_nd(input, heads_dim, sequence_dim, group, out=out, async_op=async_op, **sizes)


def heads_to_sequence(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges the whole sequence with a part of the heads for a part of the sequence with all heads.

    See `sequence_to_heads`, whose transpose it is.

    Args:
        input: In the default order ``[batch, sequence, part of the heads, ...]``.
        group: A group's name, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: ceil(n / W), the last ones
            shorter or empty.
        heads: How many heads the ranks have, one per rank, or their sum. Default: all have as many as this one.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, part of the sequence, heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": sequence, "gather_sizes": heads}
    return all_to_all_nd(input, sequence_dim, heads_dim, group, out=out, async_op=async_op, **sizes)
