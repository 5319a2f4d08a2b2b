"""What is recorded runs on other data: torch.compile, export, make_fx; FakeTensorMode has shapes only.

A call that ran at once there would leave its result in the graph as a constant, or write to memory that is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import OPTIONS, compiled
from every_function import NO_GRADIENT, Function, functions_of, input_of
from on_ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import alltoallv
import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError


def _exported(function: Function, x: Tensor) -> Function:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    made: Function = torch.export.export(Model(), (x,)).module()
    return made


WAYS: dict[str, Callable[[Function, Tensor], Function]] = {
    "compile": lambda function, x: compiled(function),
    "inductor": lambda function, x: compiled(function, "inductor"),
    "export": _exported,
    "make_fx": lambda function, x: make_fx(function)(x),
    "symbolic": lambda function, x: make_fx(function, tracing_mode="symbolic")(x),
}
SLOW = {"inductor": pytest.mark.slow}


@pytest.mark.parametrize("way", [pytest.param(way, marks=SLOW.get(way, ())) for way in WAYS])
@on_ranks(2, **OPTIONS)
def test_other_data(comm: Communicator, way: str) -> None:
    """All functions, with the results that they have without a graph; a peer has no graph."""
    x = input_of(comm)
    for name, function in functions_of(comm).items():
        expected = [function(x + n) for n in (0, 10)]
        # Recorded with both ranks there: make_fx runs what it records.
        recorded = WAYS[way](function, x)
        with torch.no_grad():
            for n, wanted in enumerate(expected):
                assert torch.equal(recorded(x + 10 * n), wanted), (name, n)
            call = recorded if comm.rank else function
            assert torch.equal(call(x + 10), expected[1]), name


@on_ranks(2, **OPTIONS)
def test_without_data(comm: Communicator) -> None:
    """Shapes and dtypes, without a word to the peers; counts that only they know are refused by torch."""
    x = input_of(comm)
    expected = {name: function(x) for name, function in functions_of(comm).items()}
    if comm.rank == 0:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            for name, function in functions_of(comm).items():
                if name in ("tensors", "learnt", "learnt handle"):
                    with pytest.raises(RuntimeError, match=r"alltoallv\.(quantized_)?all_to_all"):
                        function(fake)
                else:
                    made = function(fake)
                    assert (made.shape, made.dtype) == (expected[name].shape, expected[name].dtype), name
    assert torch.equal(functions_of(comm)["counts"](x), expected["counts"])


@on_ranks(2, **OPTIONS)
def test_what_has_no_graph(comm: Communicator) -> None:
    """Plans and operations are refused where they would be a constant; torch.compile runs them between two graphs."""
    counts = [8, 8]
    plan = at.Plan(counts, counts, group=comm)
    displs = [0, 8]
    param = alltoallv.AllToAllVParam(
        rank=comm.rank,
        rank_size=2,
        send_counts=counts,
        sdispls=displs,
        recv_counts=counts,
        rdispls=displs,
        backend="shm",
    )
    operation = at.AllToAllVOperation(param, comm)
    x = input_of(comm)
    for call in (plan, operation):
        expected = call(x)
        call(x)  # one that repeats
        with pytest.raises(InvalidTensorError, match=r"stands for other tensors.*A2A-2117"):
            make_fx(lambda x: call(x) * 2)(x)  # noqa: B023
        torch._dynamo.reset()
        broken = torch.compile(lambda x: call(x) * 2, backend="aot_eager")  # noqa: B023
        with torch.no_grad():
            assert torch.equal(broken(x), expected * 2)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, **OPTIONS)
def test_jit(comm: Communicator) -> None:
    """Its graphs would lose collectives that nobody uses the result of: refused, also where gradients are recorded."""
    x = input_of(comm)
    plan = at.Plan([8, 8], [8, 8], group=comm)
    functions = {name: call for name, call in functions_of(comm).items() if name != "memory"}
    for name, function in (functions | {"plan": lambda x: plan(x)}).items():
        function(x)  # some repeat
        inputs = [x] if name in (*NO_GRADIENT, "plan") else [x, x.clone().requires_grad_()]
        for each in inputs:
            with pytest.raises(InvalidTensorError, match=r"traced by torch\.jit.*A2A-2116"):
                torch.jit.trace(function, (each,), check_trace=False)
    assert torch.equal(functions["counts"](x), functions["learnt"](x))


@on_ranks(2, **OPTIONS)
def test_errors(comm: Communicator) -> None:
    """What a graph cannot have, as it is made; what depends on values, as it runs. The communicator goes on."""
    x = input_of(comm)
    to = {"group": comm}

    def refuses(function: Callable[[Tensor], Any], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            make_fx(function)(x)

    def single(output: Tensor, *splits: list[int]) -> Callable[[Tensor], Any]:
        return lambda x: at.all_to_all_single(output, x, *splits, **to)

    refuses(single(torch.zeros(4, 3)), InvalidTensorError, "rows of shape")
    refuses(single(torch.zeros(4, 4).int()), ValueError, "different dtypes")
    refuses(lambda x: at.all_to_all([x[:2].int(), x[2:]], [x[:2], x[2:]], **to), ValueError, "different dtypes")
    halves = {"send_counts": [2, 2], "recv_counts": [2, 2], **to}
    refuses(lambda x: at.all_to_all_v(x, unit="rows", **halves), InvalidParamError, "unit is 'rows'")
    refuses(lambda x: at.all_to_all_v(x, out=x.half(), **halves), InvalidTensorError, "dtype float16")
    refuses(lambda x: at.all_to_all_v(x, out=x.T[:2].T, unit="row", **halves), InvalidTensorError, "rows of shape")
    refuses(single(torch.zeros(3, 4)), InvalidParamError, "3 rows")
    refuses(single(torch.zeros(4, 4), [2, 2], [2, 1]), InvalidParamError, "whose sum is 4")
    refuses(lambda x: at.all_gather_into_tensor(torch.zeros(9, 4), x, **to), InvalidTensorError, "2 times the 16")
    refuses(lambda x: at.quantized_all_reduce(x, out=x[:1], **to), InvalidTensorError, "expected torch.float32 and")
    feedback = at.ErrorFeedback()
    refuses(lambda x: at.quantized_all_reduce(x, error_feedback=feedback, **to), InvalidParamError, "without error")
    assert torch.equal(functions_of(comm)["memory"](x), x * 2)
    at.functional.all_reduce(x, comm)
