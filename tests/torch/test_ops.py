"""The operators of torch.library: what torch itself checks about them, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from replicated import check_gradients
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.testing import Ranks
from alltoallv.torch.eager import group as groups
from alltoallv.torch.graph import ops as operators  # cloudpickle would take the names torch and ops for torch.ops

SIZES = pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])


def _counts(size: int) -> list[list[int]]:
    """Uneven, with zeros; row r is what rank r sends."""
    return [[(3 * i + 2 * j) % 4 for j in range(size)] for i in range(size)]


@SIZES
@on_ranks()
def test_opcheck(comm: Communicator) -> None:
    name, r, w = groups.name_of(comm), comm.rank, comm.size
    counts = _counts(w)
    sends, recvs = counts[r], [counts[j][r] for j in range(w)]
    places = [[sum(row[:j]) for j in range(w)] for row in (sends, recvs)]
    layout = torch.tensor([sends, places[0], recvs, places[1]])
    x = torch.randn(sum(sends), dtype=torch.float64, requires_grad=True)
    y = torch.randn(sum(recvs), dtype=torch.float64, requires_grad=True)
    rows = torch.randn(2 * w, 3, requires_grad=True)
    calls = [
        (operators.all_to_all_v, (x, layout, sum(recvs), 1, "all_to_all_v", name)),
        (operators.all_to_all_v, (x, layout, -1, 1, "all_to_all_v", name)),
        (operators.all_to_all_v_transpose, (y, layout, sum(sends), 1, "all_to_all_v", name)),
        (operators.all_to_all_v_learn, (x, layout[:2], 1, "all_to_all_v", name)),
        (operators.all_gather, (rows, w, "rank", name)),
        (operators.reduce_scatter, (rows, w, "", name)),
        (operators.all_reduce, (rows, "rank", name)),
    ]
    for op, arguments in calls:
        results = torch.library.opcheck(op.custom, arguments)
        assert set(results.values()) == {"SUCCESS"}, (op, results)


def _regions(size: int) -> tuple[list[list[int]], ...]:
    """send_counts, sdispls, recv_counts, rdispls with gaps, overlapping send regions and zeros."""
    counts = _counts(size)
    sdispls = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    recvs = [[counts[j][i] for j in range(size)] for i in range(size)]
    rdispls = [[5 * (size - 1 - j) + 1 for j in range(size)] for i in range(size)]  # gaps, in reverse order
    return counts, sdispls, recvs, rdispls


@SIZES
@pytest.mark.parametrize("case", ["packed", "learnt", "regions", "rows", "rows learnt", "nothing", "async"])
@on_ranks()
def test_gradients_of_all_to_all_v(comm: Communicator, size: int, case: str) -> None:
    counts, sdispls, recvs, rdispls = _regions(size)
    r = comm.rank
    lengths, tail = [sum(row) for row in counts], ()
    if case == "regions":
        lengths = [6] * size
    if case.startswith("rows"):
        tail = (2,)
    if case == "nothing":
        counts = recvs = [[0] * size] * size
        lengths = [0] * size

    def function(x: Tensor) -> Tensor:
        if case == "regions":
            where = {"sdispls": sdispls[r], "rdispls": rdispls[r]}
            return at.all_to_all_v(x, counts[r], recvs[r], **where, group=comm)
        if case == "async":
            y, work = at.all_to_all_v(x, counts[r], recvs[r], group=comm, async_op=True)
            assert work.result() is y  # with its gradient
            return y
        known = None if case.endswith("learnt") else recvs[r]
        return at.all_to_all_v(x, counts[r], known, unit="row" if tail else "element", group=comm)

    check_gradients(comm, lengths, tail, function)


@SIZES
@pytest.mark.parametrize("name", ["all_to_all_single", "all_gather", "reduce_scatter", "all_reduce"])
@on_ranks()
def test_gradients_of_functional_forms(comm: Communicator, size: int, name: str) -> None:
    def function(x: Tensor) -> Tensor:
        if name == "all_to_all_single":
            return at.functional.all_to_all_single(x, [x.shape[0] // size] * size, group=comm)
        return getattr(at.functional, name)(x, comm)

    check_gradients(comm, [size] * size, (2,), function)


@SIZES
def test_gradients_of_global_scatter_and_gather(ranks: Ranks, size: int) -> None:
    experts = 2

    def check(comm: Communicator) -> None:
        count = torch.tensor([[(i + 2 * k) % 3 for k in range(size * experts)] for i in range(size)])
        local = count[comm.rank]
        told = count.view(size, size, experts)[:, comm.rank].reshape(-1)
        sent, received = count.sum(1).tolist(), count.view(size, size, experts).sum((0, 2)).tolist()
        check_gradients(comm, sent, (2,), lambda x: at.global_scatter(x, local, told, comm))
        check_gradients(comm, received, (2,), lambda x: at.global_gather(x, local, told, comm))

    ranks(size)(check)


class Log(TorchDispatchMode):
    """Keeps the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[Tensor, Communicator], Tensor]] = {
    "all_to_all_v": lambda x, comm: at.all_to_all_v(x, [2, 2], [2, 2], group=comm),
    "all_to_all_v_learn": lambda x, comm: at.all_to_all_v(x, [2, 2], group=comm),
    "all_gather": lambda x, comm: at.functional.all_gather(x, comm),
    "reduce_scatter": lambda x, comm: at.functional.reduce_scatter(x, comm),
    "all_reduce": lambda x, comm: at.functional.all_reduce(x, comm),
    "quantized_all_reduce": lambda x, comm: at.quantized_all_reduce(x, group=comm),
    "quantized_reduce_scatter": lambda x, comm: at.quantized_reduce_scatter(x, group=comm),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_who_watches_sees_the_operators(comm: Communicator, name: str) -> None:
    """With the values and gradients of calls that nobody watches."""
    x = (torch.arange(4.0) + comm.rank).requires_grad_()
    weight = torch.arange(1.0, 9)

    def run() -> list[Tensor]:
        y = CALLS[name](x, comm)
        (grad,) = torch.autograd.grad(y, x, weight[: y.numel()].clone())
        return [y.detach(), grad]

    expected = run()
    with Log() as log:
        logged = run()
    assert f"alltoallv.{name}.default" in log.names
    with torch.profiler.profile() as profile:
        profiled = run()
    assert any(event.name == f"alltoallv::{name}" for event in profile.events() or ())
    for results in (logged, profiled):
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_results_may_be_changed_in_place(comm: Communicator, name: str) -> None:
    weight = torch.ones((), requires_grad=True)
    for x in (torch.ones(4, 3, requires_grad=True), torch.ones(4, 3)):
        with torch.set_grad_enabled(x.requires_grad):
            y = CALLS[name](x, comm)
        y.mul_(weight).sum().backward()
        assert (x.grad is not None) == x.requires_grad


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
@on_ranks(2)
def test_transforms_of_torch_func_are_refused_by_torch(comm: Communicator, transform: str) -> None:
    def transformed(call: Callable[[Tensor, Communicator], Tensor]) -> Any:
        def loss(x: Tensor) -> Tensor:
            return call(x, comm).sum()

        x = torch.ones(4)
        return torch.func.vjp(loss, x) if transform == "vjp" else getattr(torch.func, transform)(loss)(x)

    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="functorch"):
            transformed(call)
    at.barrier(comm)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@on_ranks(2)
def test_vmap_calls_once_for_each(comm: Communicator) -> None:
    x = torch.arange(12.0).view(3, 4) + comm.rank
    calls = CALLS | {"all_to_all_nd": lambda each, comm: at.all_to_all_nd(each.view(2, 2), 0, 1, comm)}
    learnt = calls.pop("all_to_all_v_learn")
    with pytest.raises(RuntimeError, match="Batching rule not implemented for alltoallv::all_to_all_v_learn"):
        torch.func.vmap(lambda each: learnt(each, comm))(x)  # its outputs may have several lengths
    for call in calls.values():
        found = torch.func.vmap(lambda each, call=call: call(each, comm))(x)
        assert torch.equal(found, torch.stack([call(each, comm) for each in x]))
    with pytest.raises(InvalidTensorError, match=r"x stands for other tensors .*torch\.func.*A2A-2117"):
        torch.func.vmap(lambda each: at.reshard(each, ([0, 1], [0]), ([0, 1], [None]), group=comm))(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for alltoallv::collective"):
        torch.func.vmap(lambda each: at.all_reduce(each, group=comm))(x)
    x = x[0].requires_grad_()
    y = CALLS["all_to_all_v"](x, comm)
    with pytest.raises(InvalidTensorError, match=r"is a batch of torch\.func\.vmap or is_grads_batched.*A2A-2120"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    at.barrier(comm)


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_forward_mode_gradients_are_refused(comm: Communicator, name: str) -> None:
    """One rank refuses them, and the others hear of it."""
    for needs_grad in (False, True):
        x = torch.ones(4, requires_grad=needs_grad)
        CALLS[name](x, comm)  # without them it goes on
        with forward_ad.dual_level(), pytest.raises(InvalidTensorError, match=r"forward-mode gradient.*A2A-2119"):
            CALLS[name](forward_ad.make_dual(x, torch.ones(4)) if comm.rank == 0 else x, comm)
