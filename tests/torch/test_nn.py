"""Modules: tokens to their experts and back, on any number of ranks as on one."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from moe_pieces import pieces_of
from on_ranks import on_ranks
from replicated import check_gradients
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.testing import Ranks

WIDTH = 6


class Problem:
    """Tokens of all ranks with their experts and weights; rank 0 has no tokens, the last one the most."""

    def __init__(self, size: int, experts: int, k: int, dtype: torch.dtype, weights: torch.dtype | None) -> None:
        generator = torch.Generator().manual_seed(17 * size + k)
        lengths = [3 * rank for rank in range(size)]
        n = sum(lengths)
        self.begins = [sum(lengths[:rank]) for rank in range(size + 1)]
        self.experts = experts
        self.tokens = torch.randn(n, WIDTH, generator=generator).to(dtype)
        self.ids = torch.randint(0, experts, (n, k), generator=generator)
        self.weights = None if weights is None else torch.rand(n, k, generator=generator).to(weights)
        self.matrices = torch.randn(experts, WIDTH, 4, generator=generator).to(dtype)
        self.scale = torch.randn(n, 4, generator=generator).to(dtype)

    def run(self, comm: Communicator, begin: int, end: int) -> list[Tensor]:
        """Output and gradients for the tokens from begin to end; every row is treated by itself."""
        x = self.tokens[begin:end].clone().requires_grad_()
        w = None if self.weights is None else self.weights[begin:end].clone().requires_grad_()
        dispatcher = at.nn.MoEDispatcher(self.experts, comm)
        rows, counts, state = dispatcher.dispatch(x, self.ids[begin:end], w)
        assert [len(part) for part in rows.split(counts)] == counts == state.counts
        assert state.experts.tolist() == [e for e, n in enumerate(counts) for _ in range(n)]
        matrices = [self.matrices[number] for number in dispatcher.local_experts]
        parts = [(part[:, :, None] * m).sum(1) for part, m in zip(rows.split(counts), matrices, strict=True)]
        y = dispatcher.combine(torch.cat([*parts, rows[:0, :4]]), state)
        y.backward(self.scale[begin:end])
        return [y.detach(), x.grad, *([] if w is None else [w.grad])]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float64, torch.float64),
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.complex64, torch.float32),
    ],
)
@on_ranks()
def test_the_same_as_one_process_bit_for_bit(
    comm: Communicator, size: int, dtype: torch.dtype, weights: torch.dtype | None
) -> None:
    (alone,) = Communicator.threads(1)
    for experts, k in itertools.product([3, 5], [1, 2, 3]):  # 3 experts: the last of 4 ranks has none
        problem = Problem(size, experts, k, dtype, weights)
        begin, end = problem.begins[comm.rank : comm.rank + 2]
        mine = problem.run(comm, begin, end)
        for ours, expected in zip(mine, problem.run(alone, 0, problem.begins[-1]), strict=True):
            assert torch.equal(ours, expected[begin:end])


@on_ranks(4)
def test_rows_that_come_back_in_pieces(comm: Communicator) -> None:
    """Of one or two tokens each; also gradients."""
    problem = Problem(4, 5, 2, torch.float32, torch.float32)
    begin, end = problem.begins[comm.rank : comm.rank + 2]
    expected = problem.run(comm, begin, end)
    with pieces_of(100):
        mine = problem.run(comm, begin, end)
    for ours, whole in zip(mine, expected, strict=True):
        assert torch.equal(ours, whole)


def test_one_exchange_each_way(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[int]:
        dispatcher, seen = at.nn.MoEDispatcher(4, comm), []

        def count() -> None:
            seen.append(comm.stats()["operators"])

        x = torch.randn(5, 3, requires_grad=True)
        weights = torch.rand(5, 2, requires_grad=True)
        count()
        rows, _, state = dispatcher.dispatch(x, torch.tensor([[0, 3]] * 5), weights)
        count()
        y = dispatcher.combine(rows * 2, state)
        count()
        y.sum().backward()
        count()
        return [after - before for before, after in itertools.pairwise(seen)]

    assert ranks(2)(check) == [[1, 1, 2]] * 2


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("k", [1, 2])
@on_ranks()
def test_gradients(comm: Communicator, size: int, k: int) -> None:
    """First and second derivatives, by tokens and by gate weights."""
    lengths = [0, 2, 3][:size] if size > 1 else [3]
    ids = torch.randint(0, 3, (sum(lengths), k), generator=torch.Generator().manual_seed(5))
    begin = sum(lengths[: comm.rank])
    mine = ids[begin : begin + lengths[comm.rank]]

    def function(x: Tensor) -> Tensor:
        dispatcher = at.nn.MoEDispatcher(3, comm)
        rows, counts, state = dispatcher.dispatch(x[:, k:], mine, x[:, :k])
        outputs = [
            part * part * (number + 1)
            for number, part in zip(dispatcher.local_experts, rows.split(counts), strict=True)
        ]
        return dispatcher.combine(torch.cat([*outputs, rows[:0]]), state)

    check_gradients(comm, lengths, (k + 2,), function)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.complex128])
@on_ranks(3)
def test_combine_is_the_inverse_of_dispatch(comm: Communicator, dtype: torch.dtype) -> None:
    """With k = 1 and no weights, every bit: NaN, infinity and -0 included. Rows may have any shape."""
    generator = torch.Generator().manual_seed(comm.rank)
    bits = torch.randint(0, 256, (11, 2, 3, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tokens = bits.view(dtype).squeeze(-1)
    ids = torch.randint(0, 5, (11,), generator=generator)
    dispatcher = at.nn.MoEDispatcher(5, comm)
    rows, counts, state = dispatcher.dispatch(tokens, ids)
    assert rows.shape == (sum(counts), 2, 3)
    assert rows.dtype == dtype
    assert state.weights is None
    back = dispatcher.combine(rows, state)
    assert back.shape == tokens.shape
    assert torch.equal(back.contiguous().view(torch.uint8), tokens.contiguous().view(torch.uint8))


def test_call_runs_experts_and_trains_them(ranks: Ranks) -> None:
    """A rank without tokens and an expert without rows take part in forward and backward."""

    def check(comm: Communicator) -> list[float]:
        dispatcher = at.nn.MoEDispatcher(4, comm)
        experts = [torch.nn.Linear(2, 2, bias=False) for _ in dispatcher.local_experts]
        for expert in experts:
            torch.nn.init.eye_(expert.weight)
        x = torch.ones(0 if comm.rank else 3, 2, requires_grad=True)
        ids = torch.tensor([[0, 2]] * 3)[: len(x)]
        y = dispatcher(x, ids, torch.full((len(x), 2), 0.5), experts)
        assert torch.equal(y, torch.ones_like(x))
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        return [float(expert.weight.grad.sum()) for expert in experts]

    assert ranks(2)(check) == [[6, 0], [6, 0]]  # 3 rows of weight 0.5, 4 entries each


@on_ranks(2)
def test_tokens_without_gradient(comm: Communicator) -> None:
    """Data in the first layer need no gradient; the gate does, and only its gradient travels back."""
    x, weights = torch.randn(4, 1000), torch.rand(4, 2, requires_grad=True)
    rows, _, state = at.nn.MoEDispatcher(2, comm).dispatch(x, torch.tensor([[0, 1]] * 4), weights)
    assert not rows.requires_grad
    assert state.weights is not None
    before = comm.stats()
    state.weights.sum().backward()
    after = comm.stats()
    assert weights.grad.tolist() == [[1, 1]] * 4
    moved = sum(after[key] - before[key] for key in after if key.startswith("bytes_"))
    assert 0 < moved < 1000


@on_ranks(2)
def test_other_tokens_by_the_same_way_are_as_many(comm: Communicator) -> None:
    dispatcher, x = at.nn.MoEDispatcher(2, comm), torch.ones(4, 3)
    rows, _, state = dispatcher.dispatch(x, torch.tensor([[0], [0], [1], [1]]))
    wrong = {
        "tokens has shape": (x[:3], state),
        "gate_weights has shape": (x, state, torch.ones(3, 1)),
        "gate_weights has dtype": (x, state, torch.ones(4, 1, dtype=torch.int64)),
        "tokens is a list": ([1.0], state),
    }
    for message, arguments in wrong.items():
        kind = TypeError if "list" in message and comm.rank == 0 else (InvalidTensorError, InvalidParamError)
        with pytest.raises(kind, match=("" if comm.rank == 0 else "failed on rank 0: .*") + message):
            dispatcher.dispatch(*(arguments if comm.rank == 0 else (x, state)))
        assert torch.equal(dispatcher.dispatch(x, state)[0], rows)


@on_ranks(2)
def test_outputs_of_another_length(comm: Communicator) -> None:
    dispatcher = at.nn.MoEDispatcher(2, comm)
    rows, _, state = dispatcher.dispatch(torch.ones(2, 3), torch.tensor([[0], [1]]))
    with pytest.raises(InvalidTensorError):
        dispatcher.combine(rows[comm.rank :], state)
    assert torch.equal(dispatcher.combine(rows, state), torch.ones(2, 3))


def test_all_to_all_v_module(ranks: Ranks) -> None:
    def check(comm: Communicator) -> None:
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        module = at.nn.AllToAllV(comm)
        y = module(x, [1, 2])
        assert torch.equal(y, at.all_to_all_v(x, [1, 2], unit="row", group=comm))
        assert torch.equal(module(x, [1, 2], [comm.rank + 1] * 2), y)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        flat = at.nn.AllToAllV(comm, unit="element")(x, [2, 2], [2, 2], sdispls=[4, 0], rdispls=[2, 0])
        assert flat.tolist() == ([4, 5, 4, 5] if comm.rank == 0 else [0, 1, 0, 1])

    ranks(2)(check)
    with pytest.raises(InvalidParamError, match=r"unit.*A2A-1443"):
        at.nn.AllToAllV(unit="rows")


def test_modules_of_the_default_group_are_copied_and_pickled() -> None:
    for module in (at.nn.MoEDispatcher(4), at.nn.AllToAllV(unit="element")):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert repr(other) == repr(module)
        assert module.state_dict() == {}
