"""The operators of torch.library that autograd, torch.compile and effects see.

``layout`` is an int64 CPU tensor of shape ``[4, W]``: send_counts, sdispls, recv_counts, rdispls, in elements. As a
tensor it may change from call to call without a recompilation. An exchange is linear; `all_to_all_v_transpose` is its
transpose and each is the gradient of the other, so derivatives of every order exist:

* elements of the input that no region sends get gradient zero, those that several regions send get the sum,
  in the order of ranks;
* elements of the output that no region covers pass nothing back.

The collectives that return a new tensor run what is declared of those that write into one (`_functional`).
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad

from alltoallv import _core
from alltoallv._calls.counts import Layout, even_parts, even_split, overlap, packed, rows_of
from alltoallv._calls.exchanges import Swap
from alltoallv._calls.guard import STATUS_SHAPE, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import COLLECTIVES, NO_PARAMETERS, Parameters
from alltoallv.torch.eager.group import AnyCommunicator, Group
from alltoallv.torch.eager.tensors import PLAIN, as_input, has_tangent, needs_grad, shaped

# Declares operators of torch.library with what a graph and autograd need to know, and calls them with little overhead.
#
# Torch's way to them, in Python for the most part, takes ten times as long as a small exchange. Where nobody watches
# the calls, an operator runs at once, and autograd learns of it by the same functions.


# Makes Inductor keep the order of the operators. Effect tokens keep the order of effectful operators up to Inductor,
# whose scheduler (as of torch 2.13) files the dependencies between them under the names of buffers but looks for
# operations' names, and so moves an operator before another where the data allow it. Ranks that compile different code
# would then issue different collectives.


_taught: set[Any] = set()


def keep_order(operator: Any) -> None:
    """Gives Inductor a lowering of an operator (an OpOverload) that keeps its place among the effectful ones."""
    if operator in _taught:
        return
    _taught.add(operator)
    with contextlib.suppress(ImportError):  # another Inductor: the ranks' comparison still finds what differs
        from torch._inductor.lowering import lowerings

        lowerings[operator] = _lowering(operator)


def _lowering(operator: Any) -> Any:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        graph = V.graph
        first = len(graph.operations)
        result = ir.FallbackKernel.create(operator, *args, **kwargs)
        previous = graph.effectful_ops.get(torch.library.EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[first:]:
                if isinstance(operation, ir.FallbackKernel):
                    graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())
        return torch.utils._pytree.tree_map(
            lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, result
        )

    return lower


class Like(NamedTuple):
    """The shape and dtype of a tensor argument, which is all that a gradient knows of it."""

    shape: torch.Size
    dtype: torch.dtype


# For operators whose results' sizes depend on values: whether they do with these arguments.
sizes_depend_on_values: dict[str, Callable[[Any], bool]] = {}


class Operator:
    """Makes the operator ``alltoallv::<name of the function>``.

    The first argument is a tensor, the last a group: in a graph the name of one (see `groups.name_of`), which is what
    the function's annotations declare, in any other call also the group itself.

    Args:
        run: The function. It returns a tensor, or a list whose first tensors may need gradients.
        fake: Takes the arguments, and returns empty tensors like those that ``run`` makes: what a graph sees.
        gradient: ``gradient(call, grad, *saved)`` returns the gradient of the first argument, or of those that may need
            one. ``call`` has all arguments by name, tensors as `Like`; ``grad`` is the output's gradient, for a list
            its first tensors, None where the argument in that place needs none.
        saves: What the gradient receives: names of arguments, places in the list that ``run`` returns.
        schema: The operator's schema, in torch's words; left out, it follows from the function's annotations.
        followed: How many of the first arguments may need gradients.
        sized_by_values: Whether the sizes of the results depend on values, given the operator's arguments.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        gradient: Callable[..., Any],
        saves: tuple[str | int, ...] = (),
        schema: str | None = None,
        followed: int = 1,
        sized_by_values: Callable[[Any], bool] | None = None,
    ) -> None:
        if sized_by_values is not None:
            sizes_depend_on_values[f"alltoallv::{run.__name__}"] = sized_by_values
        self.run, self.gradient, self.followed = run, gradient, followed
        self.custom = torch.library.custom_op(f"alltoallv::{run.__name__}", run, mutates_args=(), schema=schema)
        self.packet = getattr(torch.ops.alltoallv, run.__name__)
        effectful(self.custom, fake)
        names = [argument.name for argument in self.custom._opoverload._schema.arguments]
        self._called: Any = collections.namedtuple("Called", names)  # type: ignore[misc]
        self._inputs = [names.index(name) for name in saves if isinstance(name, str)]
        self._outputs = [index for index in saves if isinstance(index, int)]
        self.custom.register_autograd(self.backward, setup_context=self.setup)

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what `backward` needs."""
        ctx.wants = [x is not None and x.requires_grad for x in inputs[: self.followed]]
        if not isinstance(output, Tensor):
            unwanted = [x for x, wants in zip(output, ctx.wants, strict=False) if not wants]
            ctx.mark_non_differentiable(*unwanted, *output[self.followed :])
        ctx.save_for_backward(*map(inputs.__getitem__, self._inputs), *map(output.__getitem__, self._outputs))
        ctx.call = self._called(*[Like(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs])

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of all arguments."""
        grad = grads[0]
        if len(grads) > 1 or isinstance(grad, list):
            several = grad if isinstance(grad, list) else grads
            grad = [each if wants else None for each, wants in zip(several, ctx.wants, strict=False)]
        gradients = self.gradient(ctx.call, grad, *ctx.saved_tensors)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*gradients, *[None] * (len(ctx.call) - len(gradients)))

    def __call__(self, *args: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not compiling and (has_tangent(args[0]) or torch._C._is_tracing()):
            return self.run(*args)  # it refuses the call, and all ranks are informed
        if compiling or has_dispatch_mode(args[0]):
            return self.packet(*args[:-1], groups.name_of(args[-1]))
        if needs_grad(*args[: self.followed]):
            return self._direct(self.run, args)
        return self.run(*args)

    def ran(self, result: Any, *args: Any) -> Any:
        """Returns a call's result, with its gradient, where `run` has already returned ``result``."""
        return self._direct(lambda *args: result, args) if needs_grad(*args[: self.followed]) else result

    def _direct(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = _Direct.apply(self, run, *args)
        return list(result) if type(result) is tuple else result


class _Direct(torch.autograd.Function):
    """Runs an operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, run: Callable[..., Any], *args: Any) -> Any:
        output = run(*args)
        operator.setup(ctx, args, output)
        ctx.operator_called = operator
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.operator_called.backward(ctx, *grads)


def effectful(custom: Any, fake: Callable[..., Any]) -> None:
    """Declares a collective's fake for graphs. When a graph first contains the operator, Inductor is prepared for it.

    Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
    """
    torch.library._register_effectful_op(custom._qualname, torch.library.EffectType.ORDERED)

    def taught(*args: Any) -> Any:
        keep_order(custom._opoverload)
        return fake(*args)

    custom.register_fake(taught)


def known_size(size: int) -> int:
    """Returns a size, for a fake; a size below 0 is known only when the graph runs."""
    return torch.library.get_ctx().new_dynamic_size() if isinstance(size, int) and size < 0 else size


def has_dispatch_mode(tensor: Tensor) -> bool:
    """Returns whether a mode, a transform, a profiler or the tensor's class must see the operator itself."""
    return (
        type(tensor) not in PLAIN
        or tensor.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
    )


def communicator_of(group: Group, tensor: Tensor) -> AnyCommunicator:
    """Returns the communicator for a tensor, from a call's group or a graph's name of it."""
    device = groups.device_of(tensor)
    member = groups.by_name(group, device) if isinstance(group, str) else groups.resolve(group, device)
    if member is None:
        raise InvalidParamError(
            "group is one that this rank is not a member of, expected a group with this rank", id=1422
        )
    return member


def _exchange(comm: AnyCommunicator, operator: str, input: Tensor, layout: Layout, numel_out: int, row: int) -> Tensor:
    """Runs a checked exchange into a new flat tensor, whose gaps are zero."""
    with guard(comm, operator):
        x = as_input("input", input)
        needed = _core.check_exchange(x.numel(), numel_out, *layout, comm.size)
        out = calls.new_output(comm, needed if numel_out < 0 else numel_out, x)
        if sum(layout[2]) < out.numel():
            out.zero_()
        call = calls.exchange(comm, operator, out, x, layout, max(row, 1))
    call.run()
    return out


def _plain_exchange(comm: AnyCommunicator, *args: Any) -> Tensor | None:
    """Runs the exchange in the core if the core alone can check the tensors; else returns None."""
    return None if comm.host_core is None else _core.exchange(comm.host_core, *args)


def _flat(input: Tensor, layout: Tensor, numel: int, *others: Any) -> Tensor:
    return input.new_empty((known_size(numel),))


def _back(call: Any, grad: Tensor, layout: Tensor) -> Tensor:
    shape = call.input.shape
    return all_to_all_v_transpose(grad, layout, math.prod(shape), call.row, call.operator, call.group).view(shape)


def _forth(call: Any, grad: Tensor, layout: Tensor) -> Tensor:
    shape = call.grad.shape
    return all_to_all_v(grad, layout, math.prod(shape), call.row, call.operator, call.group).view(shape)


@partial(Operator, fake=_flat, gradient=_back, saves=("layout",))
def all_to_all_v(input: Tensor, layout: Tensor, numel_out: int, row: int, operator: str, group: str) -> Tensor:
    """Exchanges into a new tensor of shape ``[numel_out]``; -1 sizes it by the layout."""
    comm = communicator_of(group, input)
    if (output := _plain_exchange(comm, operator, input, layout, numel_out, row)) is not None:
        return output
    return _exchange(comm, operator, input, cast(Layout, tuple(layout.tolist())), numel_out, row)


@partial(Operator, fake=_flat, gradient=_forth, saves=("layout",))
def all_to_all_v_transpose(grad: Tensor, layout: Tensor, numel_in: int, row: int, operator: str, group: str) -> Tensor:
    """Returns the input's gradient, of shape ``[numel_in]``, from the output's."""
    comm = communicator_of(group, grad)
    if (output := _plain_exchange(comm, operator, grad, layout, numel_in, row, True)) is not None:
        return output
    sends, sdispls, recvs, rdispls = layout.tolist()
    if not overlap(sends, sdispls):
        return _exchange(comm, operator, grad, (recvs, rdispls, sends, sdispls), numel_in, row)
    places = packed(sends)
    parts = _exchange(comm, operator, grad, (recvs, rdispls, sends, places), -1, row)
    total = grad.new_zeros(numel_in)
    for count, begin, at in zip(sends, sdispls, places, strict=True):
        total[begin : begin + count] += parts[at : at + count]
    return total


@partial(
    Operator,
    fake=lambda input, sends, *others: [input.new_empty((known_size(-1),)), sends.new_empty((4, sends.shape[1]))],
    gradient=lambda call, grads, layout: _back(call, grads[0], layout),
    saves=(1,),
    sized_by_values=lambda args: True,
)
def all_to_all_v_learn(input: Tensor, sends: Tensor, row: int, operator: str, group: str) -> list[Tensor]:
    """Makes an exchange whose receive counts the peers announce. ``sends`` is ``[2, W]``; returns output and layout.

    They are a list since Inductor (torch 2.13) does not find sizes in a tuple that are known only when the graph runs.
    """
    comm = communicator_of(group, input)
    with guard(comm, operator):
        x = as_input("input", input)
        counts, displs = sends.tolist()
        _core.check_send(x.numel(), counts, displs, comm.size)
        learning = calls.learn(comm, operator, x, counts, displs, max(row, 1))
    out, recv_counts = learning.run()
    layout = torch.tensor([counts, displs, recv_counts, packed(recv_counts)], dtype=torch.int64, device="cpu")
    return [out, layout]


def _counted_back(call: Any, grads: list[Tensor], sends: Tensor, recv_counts: Tensor) -> Tensor:
    shape = call.input.shape
    rows = math.prod(shape) // max(call.row, 1)
    flat = grads[0].contiguous()
    back: Tensor = all_to_all_v_counted(flat, recv_counts, None, None, rows, call.row, call.group)[0]
    return back.view(shape)


@partial(
    Operator,
    schema="(Tensor input, Tensor sends, Tensor? sdispls, Tensor? recvs, SymInt capacity, SymInt row, str group)"
    " -> Tensor[]",
    fake=lambda input, sends, sdispls, recvs, capacity, row, group: [
        input.new_empty((capacity * row,)),
        sends.new_empty(sends.shape),
        sends.new_empty(STATUS_SHAPE, dtype=torch.int32),
    ],
    gradient=_counted_back,
    saves=("sends", 1),
)
def all_to_all_v_counted(
    input: Tensor, sends: Tensor, sdispls: Tensor | None, recvs: Tensor | None, capacity: int, row: int, group: str
) -> list[Tensor]:
    """Exchanges rows whose counts, int64 ``[W]``, lie on the device: returns what `Received` has, the output flat."""
    comm = communicator_of(group, input)
    with guard(comm, "all_to_all_v"):
        x = as_input("input", input)
        counts = [None if each is None else as_input("counts", each) for each in (sends, sdispls, recvs)]
        received = torch.empty_like(sends) if recvs is None else recvs.clone()
        outs = [x.new_zeros(capacity * row), received, sends.new_zeros(STATUS_SHAPE, dtype=torch.int32)]
        call = calls.exchange_counted(comm, x, row, counts, outs)
    call.run()
    return outs


def _swap_back(call: Any, grad: Tensor) -> Tensor:
    sizes = call.gather_sizes, call.scatter_sizes
    back: Tensor = all_to_all_nd(grad, call.gather_dim, call.scatter_dim, *sizes, call.rank, call.group)
    return back


@partial(
    Operator,
    schema="(Tensor input, int scatter_dim, int gather_dim, SymInt[] scatter_sizes, SymInt[] gather_sizes, int rank,"
    " str group) -> Tensor",
    fake=lambda input, scatter_dim, gather_dim, scatter_sizes, gather_sizes, rank, group: input.new_empty(
        Swap(tuple(input.shape), scatter_dim, gather_dim, tuple(scatter_sizes), tuple(gather_sizes), rank).shape_out
    ),
    gradient=_swap_back,
)
def all_to_all_nd(
    input: Tensor,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: list[int],
    gather_sizes: list[int],
    rank: int,
    group: str,
) -> Tensor:
    """Exchanges one dimension for another; the sizes are every rank's, and have been checked."""
    comm = communicator_of(group, input)
    if comm.host_core is not None:
        dims = scatter_dim, gather_dim, list(scatter_sizes), list(gather_sizes)
        result: Tensor | None = _core.all_to_all_nd(comm.host_core, input, None, *dims, False)
        if result is not None:
            return result
    with guard(comm, "all_to_all_nd"):
        swap = Swap(tuple(input.shape), scatter_dim, gather_dim, tuple(scatter_sizes), tuple(gather_sizes), rank)
        operation = calls.exchange_dimensions(comm, swap, input)
    operation.run()
    return operation.result  # type: ignore[no-any-return]


def _to_leaves(call: Any, grad: Tensor) -> Tensor:
    """Returns the sum of the ranks' gradients, in a tree over the ranks, for every leaf."""
    size = call.leaves // call.input.shape[0]
    total: Tensor = all_reduce_leaves(grad.unsqueeze(0), size, call.group)
    return total.expand(call.input.shape)


@partial(Operator, fake=lambda input, *others: input.new_empty(input.shape[1:]), gradient=_to_leaves)
def all_reduce_leaves(input: Tensor, leaves: int, group: str) -> Tensor:
    """Adds ``leaves`` tensors, of which every rank has its share, ``[leaves / W, ...]``, in a tree."""
    comm = communicator_of(group, input)
    with guard(comm, "all_reduce"):
        x = as_input("input", input)
        _core.checked_leaves(leaves, x.shape, comm.size)
        out = calls.new_output(comm, x.shape[1:], x)
        counts = even_parts(out.numel(), comm.size)
        operation = calls.reduce(comm, "all_reduce", out, x, "sum", counts, x.shape, leaves=leaves)
    operation.run()
    return out


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of a leaf; see `alltoallv._calls.collectives.leaf_products`."""
    # Contiguous, each in memory of its own: a library may choose its way by strides and alignment.
    return torch.nn.functional.linear(x.contiguous(), weight.contiguous())


FUNCTIONAL: dict[str, Operator] = {}


def _functional(
    name: str, declared: str, shape: Callable[..., Sequence[int]], gradient: str, parameters: str = "SymInt size, "
) -> Operator:
    """Returns the operator of a collective that returns a new tensor.

    Args:
        name: The operator's name.
        declared: The collective, whose ``prepare`` also takes an input, and whose ``at_once`` makes an output that is
            None.
        shape: The output's shape, from the input's and what is ``parameters``.
        gradient: The name of the operator that the output's gradient goes through, with what is ``parameters``.
        parameters: The operator's arguments between the input and the order, in torch's words: the number of ranks.
    """

    def run(input: Tensor, *options: Any) -> Tensor:
        comm, row = communicator_of(options[-1], input), COLLECTIVES[declared]
        with guard(comm, row.operator):
            shape_out = shape(input.shape, *options[:-2])
            parameters = Parameters(order=variables.order("order", options[-2])) if options[-2] else NO_PARAMETERS
        if comm.host_core is not None and row.at_once is not None:
            result = row.at_once(comm.host_core, [None], [input], parameters, None, False)
            if result is not None:  # a gather's is stacked
                return result if result.dim() == input.dim() else shaped(result, shape_out)
        with guard(comm, row.operator):
            x = as_input("input", input)
            out = calls.new_output(comm, shape_out, x)
            operation = row.prepare(comm, [out], [x], parameters)
        operation.run()
        return out

    run.__name__ = name
    FUNCTIONAL[name] = Operator(
        run,
        fake=lambda input, *options: input.new_empty(shape(input.shape, *options[:-2])),
        gradient=lambda call, grad: FUNCTIONAL[gradient](grad, *call[1:]),
        schema=f"(Tensor input, {parameters}str order, str group) -> Tensor",
    )
    return FUNCTIONAL[name]


all_reduce = _functional("all_reduce", "all_reduce", lambda shape: shape, "all_reduce", "")
all_gather = _functional(
    "all_gather", "all_gather_into_tensor", lambda shape, size: (size * rows_of(shape), *shape[1:]), "reduce_scatter"
)
reduce_scatter = _functional(
    "reduce_scatter",
    "reduce_scatter_tensor",
    lambda shape, size: (even_split("input", rows_of(shape), size)[0], *shape[1:]),
    "all_gather",
)


# Gradients of exchanges in host memory, where nobody but autograd sees a call: the core's call, and its transpose.


class _Exchange(torch.autograd.Function):
    """Gives the output of an exchange that has run its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, result: tuple[Tensor, _core.LinearCall]) -> Tensor:
        ctx.shape, ctx.comm, ctx.linear = input.shape, comm, result[1]
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        linear, comm = ctx.linear, ctx.comm
        back = None
        if not torch.is_grad_enabled():
            back = linear.apply(comm.core, grad, True)
        if back is None or back is NotImplemented:  # with a gradient of its own, or of regions that overlap
            layout = torch.frombuffer(linear.layout, dtype=torch.int64).view(4, -1)
            arguments = math.prod(ctx.shape), linear.row, "all_to_all_v", comm
            back = all_to_all_v_transpose(grad, layout, *arguments).view(ctx.shape)
        return back, None, None


class _QuantizedSum(torch.autograd.Function):
    """Gives a quantized sum the gradient of the sum, straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, output: tuple[Tensor], op: str) -> Tensor:
        ctx.dtype, ctx.comm, ctx.op = input.dtype, comm, op
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        back = all_reduce(grad.to(ctx.dtype), "", ctx.comm)
        return back / ctx.comm.size if ctx.op == "avg" else back, None, None, None


def quantized_sum(comm: Communicator, input: Tensor, options: tuple[Any, ...]) -> Tensor | None:
    """Runs a quantized all-reduce of a tensor that wants a gradient; for None see `exchange`.

    ``options``: the core's arguments from the format to the overflow.
    """
    if torch._C._are_functorch_transforms_active():
        return None
    format, group_size, gather, op, overflow = options
    result = _core.quantized_all_reduce(comm.core, input, None, format, group_size, gather, op, overflow, tracked=True)
    output: Tensor | None = None if result is None else _QuantizedSum.apply(input, comm, (result,), op)
    return output


def exchange(input: Tensor, comm: Communicator, counts: tuple[Any, ...]) -> Tensor | None:
    """Runs an all_to_all_v of a tensor that wants a gradient; None, with nothing done, if others must look at it."""
    if torch._C._are_functorch_transforms_active():
        return None
    result = _core.linear_all_to_all_v(comm.core, input, *counts)
    output: Tensor | None = None if result is None else _Exchange.apply(input, comm, result)
    return output
