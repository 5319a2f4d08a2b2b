"""Stand-ins for MindSpore's communication primitives on CPU, which `alltoallv.mindspore.install` puts in their places.

They are subclasses with the same names, so a graph takes them for MindSpore's: it infers their shapes and takes their
gradients as ever, and runs the kernels of `kernels`. Outside of a graph they run at the call, with gradients as
MindSpore defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function
from mindspore.communication.comm_func import default_handle
from mindspore.ops._grad_experimental.grad_base import bprop_getters
from mindspore.ops.operations import _grad_ops, comm_ops

from alltoallv._calls.guard import guard
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.front_end import enter, refuse_gradient
from alltoallv.mindspore.group import WORLD as _NAMES
from alltoallv.mindspore.primitives import kernels
from alltoallv.mindspore.primitives.rules import RULES, plan
from alltoallv.mindspore.tensors import as_input, empty, tracks

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather_into_tensor",
    "reduce_scatter_tensor",
    "scatter_tensor",
]


Tensors = Sequence[Tensor]


class StandIn:
    """What all stand-ins share; the other base class is MindSpore's primitive."""

    many: ClassVar[bool] = False  # takes a tuple of tensors and returns one
    differentiated: ClassVar[tuple[str, ...]] = ("sum",)  # ops with a gradient
    attrs: dict[str, Any]
    name: str
    group: str

    @property
    def __primitive_flag__(self) -> Any:
        """MindSpore asks for it when it finds the primitive in a graph."""
        kernels.load()
        return super().__primitive_flag__  # type: ignore[misc]

    def __call__(self, *inputs: Any) -> Any:
        enter(self.attrs["group"])
        tensors = tuple(inputs[0]) if self.many and inputs else inputs[:1]
        tensors, counts = tuple(x for x in tensors if x is not None), inputs[1:]
        if tensors and tracks(*tensors):
            if not self.has_gradient():
                with guard(groups.resolve(self.attrs["group"]), RULES[self.name][0]):
                    refuse_gradient(f"{self.name}{self.attrs}", *tensors)
            return _Run.apply(self, counts, *tensors)
        outputs = self.run(counts, *tensors)
        return outputs if self.many else outputs[0]

    def run(self, counts: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the primitive at once."""
        operator, _ = RULES[self.name]
        with guard(groups.resolve(self.attrs["group"]), operator, TypeError):
            arrays = [as_input(x).asnumpy() for x in tensors]
            numbers = [np.asarray(each.asnumpy() if isinstance(each, Tensor) else each, np.int64) for each in counts]
        ready = plan(self.name, self.attrs, [*arrays, *numbers])
        outputs = [
            empty(shape, dtype)
            for shape, dtype in zip(ready.shapes, self.dtypes(tensors, len(ready.shapes)), strict=True)
        ]
        ready.run([out.asnumpy() for out in outputs])
        return tuple(outputs)

    def dtypes(self, tensors: Tensors, number: int) -> Sequence[Any]:
        """Returns the outputs' dtypes."""
        return [tensors[0].dtype if tensors else mindspore.float32] * number

    def has_gradient(self) -> bool:
        """Returns whether MindSpore defines a gradient."""
        return type(self).back is not StandIn.back and self.attrs.get("op", "sum") in self.differentiated

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        """Returns the gradients of the tensors, which are zero where a tensor that wants one is refused."""
        return [ops.zeros_like(each) for each in x]


class _Run(_Function):
    @staticmethod
    def forward(ctx: Any, primitive: StandIn, counts: Sequence[Any], *tensors: Tensor) -> Any:
        outputs = primitive.run(counts, *tensors)
        ctx.primitive, ctx.counts, ctx.tensors, ctx.outputs = primitive, counts, tensors, outputs
        return outputs if primitive.many else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.primitive.back(ctx.tensors, ctx.counts, ctx.outputs, grads)


class AllReduce(StandIn, comm_ops.AllReduce):
    differentiated = "sum", "avg", "prod", "max", "min"

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        op = self.attrs["op"]
        total = AllReduce("avg" if op == "avg" else "sum", self.group)
        if op == "prod":
            return [total(dout[0] * out[0]) / x[0]]
        grad = total(dout[0])
        return [grad if op in ("sum", "avg") else grad * ops.equal(x[0], out[0]).astype(grad.dtype)]


class Reduce(StandIn, comm_ops.Reduce):
    def infer_shape(self, x_shape: Any) -> Any:
        return x_shape if groups.resolve(self.group).rank == self.attrs["dest_rank"] else [1]

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        comm = groups.resolve(self.group)
        own = dout[0] if comm.rank == self.attrs["dest_rank"] else ops.zeros_like(x[0])
        return Broadcast(groups.members(self.group)[self.attrs["dest_rank"]], self.group)((own,))


class AllGather(StandIn, comm_ops.AllGather):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return [ReduceScatter("sum", self.group)(dout[0])]


class AllGatherV(StandIn, comm_ops.AllGatherV):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return [ReduceScatterV("sum", self.group)(dout[0], *counts)]


class ReduceScatter(StandIn, comm_ops.ReduceScatter):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return [AllGather(self.group)(dout[0])]


class ReduceScatterV(StandIn, comm_ops.ReduceScatterV):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return [AllGatherV(self.group)(dout[0], *counts)]


class Broadcast(StandIn, comm_ops.Broadcast):
    many = True

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return dout


class CollectiveScatter(StandIn, comm_ops.CollectiveScatter):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        group, root = self.attrs["group"], self.attrs["src_rank"]
        gathered = CollectiveGather(root, group)(dout[0])
        return [
            gathered if groups.rank_in(group, root, "src_rank") == groups.resolve(group).rank else ops.zeros_like(x[0])
        ]


class CollectiveGather(StandIn, comm_ops.CollectiveGather):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        group, root = self.attrs["group"], self.attrs["dest_rank"]
        comm = groups.resolve(group)
        n, at_root = x[0].shape[0], groups.rank_in(group, root, "dest_rank") == comm.rank
        own = dout[0] if at_root else ops.zeros((n * comm.size, *x[0].shape[1:]), x[0].dtype)
        received = Broadcast(root, group)((own,))[0]
        return [received[comm.rank * n : (comm.rank + 1) * n]]


class AlltoAll(StandIn, comm_ops.AlltoAll):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        return [
            AlltoAll(self.attrs["split_count"], self.attrs["concat_dim"], self.attrs["split_dim"], self.group)(dout[0])
        ]


class AlltoAllV(StandIn, comm_ops.AlltoAllV):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        grad = AlltoAllV(self.group, self.attrs["block_size"])(dout[0], counts[1], counts[0])
        return [_like(grad, x[0])]


class AlltoAllVC(StandIn, comm_ops.AlltoAllVC):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        again = AlltoAllVC(self.group, self.attrs["block_size"], not self.attrs["transpose"])
        return [_like(again(dout[0], *counts), x[0])]


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """Returns a gradient in the input's shape: where nothing was sent, it has one element and the input one or none."""
    return grad.reshape(x.shape) if x.size else ops.zeros_like(x)


class Barrier(StandIn, comm_ops.Barrier):
    pass


class Send(StandIn, comm_ops.Send):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        terms = self.attrs["sr_tag"], self.attrs["dest_rank"], list(x[0].shape), x[0].dtype
        return [Receive(*terms, self.attrs["group_back"])(ops.depend(x[0], dout[0]))]


class Receive(StandIn, comm_ops.Receive):
    def run(self, counts: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        return super().run((), *())

    def dtypes(self, tensors: Tensors, number: int) -> Sequence[Any]:
        return [self.attrs["dtype"]]

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        sent = Send(self.attrs["sr_tag"], self.attrs["src_rank"], self.attrs["group_back"])(dout[0])
        return [ops.depend(ops.zeros_like(x[0]), sent)]


class BatchISendIRecv(StandIn, comm_ops.BatchISendIRecv):
    many = True

    def dtypes(self, tensors: Tensors, number: int) -> Sequence[Any]:
        received, sent = iter(self.attrs["receive_dtypes"]), iter(tensors)
        return [next(sent).dtype if kind == "isend" else next(received) for kind in self.attrs["op_types"]]


class NeighborExchange(StandIn, comm_ops.NeighborExchange):
    many = True

    def dtypes(self, tensors: Tensors, number: int) -> Sequence[Any]:
        return [self.attrs["recv_type"]] * number

    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        names = "recv_rank_ids", "send_rank_ids", "send_shapes", "recv_shapes", "recv_type", "group"
        return NeighborExchange(*(self.attrs[name] for name in names))(tuple(dout))


class NeighborExchangeV2(StandIn, comm_ops.NeighborExchangeV2):
    def back(self, x: Tensors, counts: Sequence[Any], out: Tensors, dout: Tensors) -> Tensors:
        names = "recv_rank_ids", "recv_lens", "send_rank_ids", "send_lens", "data_format", "group"
        return [NeighborExchangeV2Grad(*(self.attrs[name] for name in names))(dout[0])]


class NeighborExchangeV2Grad(StandIn, _grad_ops.NeighborExchangeV2Grad):
    pass


class SummedBroadcast(Broadcast):
    """A Broadcast whose gradient is the sum of all ranks' gradients and goes to the root, as comm_func's."""

    substitute_name = "Broadcast"


def _in_graphs(stand_in: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers what makes the gradient that graphs take of a stand-in; MindSpore's own keeps its name."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        bprop_getters[id(stand_in)] = make
        return make

    return register


# In graphs MindSpore takes gradients from here. It has none of an average:
@_in_graphs(AllReduce)
def _all_reduce_back(self: AllReduce) -> Any:
    if self.attrs["op"] != "avg":
        return bprop_getters["AllReduce"](self)
    total = AllReduce("avg", self.group)

    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (total(dout),)

    return bprop


# Its own of two do not fit: off the root the output has one element.
@_in_graphs(Reduce)
def _reduce_back(self: Reduce) -> Any:
    root = self.attrs["dest_rank"]
    broadcast = Broadcast(groups.members(self.group)[root], self.group)
    at_root = groups.resolve(self.group).rank == root

    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> Any:
        own = dout if at_root else ops.depend(ops.zeros_like(x), dout)
        return (broadcast((own,))[0],)

    return bprop


@_in_graphs(CollectiveGather)
def _gather_back(self: CollectiveGather) -> Any:
    root, group = self.attrs["dest_rank"], self.attrs["group"]
    broadcast, comm = Broadcast(root, group), groups.resolve(group)
    at_root, rank, size = groups.rank_in(group, root, "dest_rank") == comm.rank, comm.rank, comm.size

    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> Any:
        own = dout if at_root else ops.depend(ops.concat((ops.zeros_like(x),) * size), dout)
        return (ops.split(broadcast((own,))[0], x.shape[0])[rank],)

    return bprop


@_in_graphs(Send)  # MindSpore's own fails with the dtype that it finds
def _send_back(self: Send) -> Any:
    tag, peer, group = (self.attrs[name] for name in ("sr_tag", "dest_rank", "group_back"))

    def bprop(x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (Receive(tag, peer, x.shape, x.dtype, group)(ops.depend(x, dout)),)

    return bprop


@_in_graphs(SummedBroadcast)
def _broadcast_back(self: SummedBroadcast) -> Any:
    root, group = self.attrs["root_rank"], self.attrs["group"]
    total, elsewhere = AllReduce("sum", group), groups.rank_in(group, root, "src") != groups.resolve(group).rank
    mask = Tensor([elsewhere])  # of a constant, MindSpore would drop the reductions that follow on this rank alone

    def bprop(x: Any, out: Any, dout: Any) -> Any:
        grads: Any = ()
        for each in dout:
            grads = (*grads, ops.masked_fill(total(each), mask, 0.0))
        return (grads,)

    return bprop


STAND_INS: tuple[type[Any], ...] = (
    *(AllGather, AllGatherV, AllReduce, AlltoAll, AlltoAllV, AlltoAllVC, Barrier, BatchISendIRecv, Broadcast),
    *(CollectiveGather, CollectiveScatter, NeighborExchange, NeighborExchangeV2, NeighborExchangeV2Grad, Receive),
    *(Reduce, ReduceScatter, ReduceScatterV, Send),
)


# What MindSpore's parser takes for the functions of ``mindspore.communication.comm_func`` when it makes a graph.


WORLD = _NAMES[0]


def all_reduce(tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False) -> Any:
    return AllReduce(op, group)(tensor), default_handle if async_op else None


def all_gather_into_tensor(tensor: Tensor, group: str = WORLD, async_op: bool = False) -> Any:
    return AllGather(group)(tensor), default_handle if async_op else None


def reduce_scatter_tensor(tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False) -> Any:
    return ReduceScatter(op, group)(tensor), default_handle if async_op else None


def broadcast(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    return SummedBroadcast(src, group)((tensor,))[0]


def scatter_tensor(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    return CollectiveScatter(src, group)(tensor)


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: str = WORLD) -> Tensor:
    return CollectiveGather(dst, group)(tensor)


def barrier(group: str = WORLD) -> Any:
    return Barrier(group)()
