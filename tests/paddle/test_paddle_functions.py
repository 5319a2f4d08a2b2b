"""Every function on every dtype, bit for bit what the reference says, with gradients of two orders."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from paddle_arrays import to_numpy, to_paddle

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv._calls.adapters import as_bytes
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.paddle import _needs
from alltoallv.paddle.front_end import _NAMES, ADAPTER, allocate, region
from alltoallv.testing import Ranks, golden, reference

DTYPES = [name for name in _NAMES.values() if name not in ("uint16", "uint32", "uint64")]  # which no operator has


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 3]))
@on_ranks()
def test_regions_anywhere(comm: Communicator, seed: int, size: int) -> None:
    """Overlapping send regions, gaps, rows, and outputs that keep what no region covers; gradients of both orders."""
    random, r = np.random.default_rng(seed), comm.rank
    counts = random.integers(0, 4, (size, size))
    sdispls = random.integers(0, 6, (size, size))
    places = np.stack([random.permutation(size) for _ in range(size)])
    arrays = (counts, sdispls, counts.T, 4 * places + 1)
    inputs = [random.standard_normal((10, 2)) for _ in range(size)]
    before = [random.standard_normal((4 * size + 1, 2)) for _ in range(size)]
    expected = reference.all_to_all_v(inputs, *arrays, before)[r]
    mine = [array[r].tolist() for array in arrays]
    named = {"sdispls": mine[1], "rdispls": mine[3], "unit": "row", "group": comm}
    x, out = paddle.to_tensor(inputs[r]), paddle.to_tensor(before[r])
    assert ap.all_to_all_v(x, mine[0], mine[2], out=out, **named) is out
    assert np.array_equal(out.numpy(), expected)

    x.stop_gradient = False
    y = ap.all_to_all_v(x, mine[0], mine[2], **named)
    zeros = reference.all_to_all_v(inputs, *arrays)[r]
    assert np.array_equal(y.numpy(), zeros[: len(y)])  # ours ends with the last element that arrives
    assert not zeros[len(y) :].any()
    sent = np.zeros(10)
    for count, begin in zip(mine[0], mine[1], strict=True):
        sent[begin : begin + count] += 1
    (slope,) = paddle.grad((y**3).sum(), x, create_graph=True)
    assert np.allclose(slope.numpy(), 3 * inputs[r] ** 2 * sent[:, None])
    (curve,) = paddle.grad(slope.sum(), x)
    assert np.allclose(curve.numpy(), 6 * inputs[r] * sent[:, None])


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_experts(comm: Communicator, size: int) -> None:
    """Against the reference, every dtype; gather is the inverse, and each the other's gradient, of two orders."""
    r, experts = comm.rank, 3
    for seed, dtype in enumerate(DTYPES):
        random = np.random.default_rng(seed)
        local = random.integers(0, 4, (size, size, experts))
        global_ = local.transpose(1, 0, 2)
        rows = [golden.fill(random, (int(n.sum()), 2), dtype) for n in local]
        mine = local[r].reshape(-1).tolist(), paddle.to_tensor(global_[r].reshape(-1))
        expected = reference.global_scatter(rows, local.reshape(size, -1).tolist(), global_.reshape(size, -1))[r]
        y = ap.global_scatter(to_paddle(rows[r]), *mine, group=comm)
        assert str(y.dtype) == f"paddle.{dtype}"
        golden.assert_bits_equal(to_numpy(y), expected, dtype)
        by_card = local[r].tolist(), paddle.to_tensor(global_[r])  # as Paddle's own layers give them
        golden.assert_bits_equal(to_numpy(ap.global_gather(y, *by_card, group=comm)), rows[r], dtype)
    x = paddle.to_tensor(random.standard_normal((int(local[r].sum()), 2)), stop_gradient=False)
    y = ap.global_gather(ap.global_scatter(x, *mine, group=comm) * 2, *mine, group=comm)
    (slope,) = paddle.grad((y**3).sum(), x, create_graph=True)
    assert np.allclose(slope.numpy(), 24 * x.numpy() ** 2)
    (curve,) = paddle.grad(slope.sum(), x)
    assert np.allclose(curve.numpy(), 48 * x.numpy())


@on_ranks(2)
def test_views_and_scalars(comm: Communicator) -> None:
    both = [np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * j for j in range(2)]
    base = paddle.to_tensor(both[comm.rank])
    part = slice(0, 6) if comm.rank == 0 else slice(6, 12)
    y = ap.all_to_all_v(base.T, [6, 6], [6, 6], unit="element", group=comm)  # its memory is in another order
    assert np.array_equal(y.numpy(), np.concatenate([b.T.reshape(-1)[part] for b in both]))
    y = ap.all_to_all_v(base[1:], [4, 4], [4, 4], unit="element", group=comm)
    assert np.array_equal(y.numpy(), np.concatenate([b[1 + comm.rank] for b in both]))
    out = paddle.zeros([3, 4])
    ap.alltoall_single(out[1:], base[:2], group=comm)  # a part of a larger tensor
    assert out[0].tolist() == [0] * 4
    assert np.array_equal(out[1:].numpy(), np.stack([b[comm.rank] for b in both]))
    outs = [paddle.zeros([]), paddle.zeros([1, 1])]
    ap.alltoall(outs, [paddle.to_tensor(float(comm.rank)), paddle.to_tensor(10.0 + comm.rank)], group=comm)
    assert [t.tolist() for t in outs] == ([0, [[1]]] if comm.rank == 0 else [10, [[11]]])


def test_tensors_are_read_where_they_lie() -> None:
    x = paddle.ones([4, 3])
    x.stop_gradient = False
    assert ADAPTER.contiguous(x).data_ptr() == x.data_ptr()
    assert ADAPTER.contiguous(x[1:]).data_ptr() == x.data_ptr() + 12
    assert ADAPTER.contiguous(x.T).data_ptr() != x.data_ptr()


@on_ranks(2)
def test_dropped_tasks_keep_their_tensors(comm: Communicator) -> None:
    n = 1 << 18
    for step in range(10):
        out = allocate((2 * n,), "float32")
        ap.alltoall_single(out, paddle.full([2 * n], float(step + comm.rank)), group=comm, sync_op=False)
        gc.collect()
        paddle.full([2 * n], -1.0)  # would take the place of a freed input
        ap.exchange_counts([0, 0], comm)  # queues behind
        assert out[0].item() == step
        assert out[-1].item() == step + 1
        assert (out[:n] == step).all()
        assert (out[n:] == step + 1).all()


@on_ranks(2)
def test_outputs_lie_in_shared_memory_and_outlive_their_communicator(comm: Communicator) -> None:
    before = comm.stats()["arena_used_bytes"]
    y = ap.all_to_all_v(paddle.ones([200_000]), [100_000, 100_000], [100_000, 100_000], group=comm)
    assert comm.stats()["arena_used_bytes"] >= before + 800_000
    part = y[10:20]
    del y
    other = ap.empty([200_000], paddle.float32)
    as_bytes(region(other))[...] = 255
    assert part.tolist() == [1] * 10
    del part, other
    gc.collect()
    assert comm.stats()["arena_used_bytes"] < before + 800_000


@on_ranks(2)
def test_writing_into_what_backward_needs_is_noticed(comm: Communicator) -> None:
    x = paddle.ones([2])
    x.stop_gradient = False
    out = x * 1
    loss = (out * out).sum()
    ap.alltoall_single(out.detach(), paddle.full([2], 5.0), group=comm)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@on_ranks(2)
def test_an_error_in_backward_is_an_error_on_all(comm: Communicator) -> None:
    """Paddle gives it another class, and keeps ours in the text."""
    y = ap.all_to_all_v(paddle.to_tensor([1.0, 1.0], stop_gradient=False), [1, 1], [1, 1], group=comm)
    call = (lambda: ap.exchange_counts([1, 1], comm)) if comm.rank else y.sum().backward
    with pytest.raises((OSError, PeerMismatchError), match=r"PeerMismatchError|exchange_counts"):
        call()
    assert ap.exchange_counts([1, 1], comm).tolist() == [1, 1]


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_arguments_stand_where_paddle_has_them() -> None:
    """An exchange that takes its output for its input destroys the input."""
    shared = [name for name in ap.__all__ if inspect.isfunction(getattr(paddle.distributed, name, None))]
    shared.remove("new_group")  # which has ranks alone
    shared.remove("reshard")  # whose tensors bring their layout along
    assert {"alltoall", "alltoall_single", "all_gather", "reduce_scatter"} <= set(shared)
    for name in shared:
        theirs = _names(getattr(paddle.distributed, name))
        assert _names(getattr(ap, name))[: len(theirs)] == theirs, name
    assert _names(ap.P2POp) == _names(paddle.distributed.P2POp)


@on_ranks(2)
def test_a_layout_of_paddle_is_refused(comm: Communicator) -> None:
    """Its `reshard` has a tensor that knows the source, and the target's mesh and placements apart."""
    mesh = paddle.distributed.ProcessMesh([0, 1])
    with pytest.raises(InvalidParamError, match=r"source has the mesh .*expected ranks"):
        ap.reshard(paddle.ones([2]), mesh, [paddle.distributed.Shard(0)], group=comm)


@on_ranks(2)
def test_exchanges_by_position_keep_the_input(comm: Communicator) -> None:
    out, x = paddle.zeros([4]), paddle.arange(4.0) + 10 * comm.rank + 1
    ap.alltoall_single(out, x, None, None, comm)
    outs, ins = [paddle.zeros([2]), paddle.zeros([2])], list(x.split(2))
    ap.alltoall(outs, ins, comm)
    right = [1 + 2 * comm.rank, 2 + 2 * comm.rank, 11 + 2 * comm.rank, 12 + 2 * comm.rank]
    assert out.tolist() == paddle.concat(outs).tolist() == right
    assert x.tolist() == paddle.concat(ins).tolist() == [10 * comm.rank + n for n in (1, 2, 3, 4)]
    ap.alltoall(fresh := [], ins, comm)
    assert paddle.concat(fresh).tolist() == right


def test_an_older_paddle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle 2 takes the input first."""

    def alltoall_single(in_tensor: Any, out_tensor: Any) -> None: ...

    monkeypatch.setattr(paddle.distributed, "alltoall_single", alltoall_single)
    with pytest.raises(ImportError, match="needs paddlepaddle 3, whose alltoall_single takes the output first"):
        importlib.reload(_needs)


def test_a_communicator_of_devices_is_refused() -> None:
    """HCCL would take the tensors' addresses for a device's."""
    (comm,) = Communicator.threads(1)
    comm.backend, comm.host_core = "hccl", None
    with pytest.raises(InvalidParamError, match="group has backend 'hccl', expected one for tensors in host memory"):
        ap.barrier(comm)


def test_alone_and_in_static_mode() -> None:
    """Without a launcher the job is one process."""
    assert ap.all_to_all_v(paddle.arange(6.0), [3], [3], sdispls=[2]).tolist() == [2, 3, 4]
    rows, counts = paddle.to_tensor([[1.0, 1.0]] * 3, stop_gradient=False), [1, 2]
    ap.global_gather(ap.global_scatter(rows, counts, counts), counts, counts).sum().backward()
    assert rows.grad.tolist() == [[1, 1]] * 3
    x = paddle.ones([2])
    task = ap.alltoall_single(out := paddle.zeros([2]), x, group=ap.new_group([0]))
    assert (task.wait(), task.is_completed(), task.is_sync(), out.tolist()) == (True, True, True, [1, 1])
    assert not ap.alltoall_single(out, x, sync_op=False).is_sync()
    with pytest.raises(InvalidParamError, match="expected different ranks below 1"):
        ap.new_group([0, 1])
    paddle.enable_static()
    try:
        with pytest.raises(RuntimeError, match="only supported in dygraph mode"):
            ap.all_to_all_v(x, [1], [1])
    finally:
        paddle.disable_static()


def test_gradients_of_bfloat16(ranks: Ranks) -> None:
    def check(comm: Communicator) -> Any:
        x = paddle.to_tensor([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], dtype="bfloat16", stop_gradient=False)
        counts = [[2, 1, 1, 1], [1, 1, 2, 1]][comm.rank]
        y = ap.global_gather(x, counts, counts, group=comm)
        assert y.dtype == paddle.bfloat16
        (y * y).backward()
        return x.grad.astype("float64").tolist()

    assert ranks(2)(check) == [[[2, 4], [6, 8], [10, 12], [14, 16], [18, 20]]] * 2


# The defaults that are not Paddle's: ours is that of all timeouts.
DEFAULTS: dict[str, dict[str, Any]] = {"new_group": {"timeout": 600.0}}


@on_ranks(2)
def test_arguments_are_those_of_paddle(comm: Communicator) -> None:
    """In Paddle's order, with its defaults; ours after them are given by name."""
    names = [name for name in ap.__all__ if inspect.isfunction(getattr(paddle.distributed, name, None))]
    names.remove("reshard")
    assert len(names) > 18
    of_paddle = {name: getattr(paddle.distributed, name) for name in names}
    experts = importlib.import_module("paddle.distributed.utils.moe_utils")
    of_paddle |= {name: getattr(experts, name) for name in ("global_scatter", "global_gather")}
    for name, function in of_paddle.items():
        other = DEFAULTS.get(name, {})
        theirs = inspect.signature(function).parameters.values()
        expected = [(p.name, other.get(p.name, p.default)) for p in theirs]
        ours = inspect.signature(getattr(ap, name)).parameters.values()
        assert [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY] == expected, name
    x, counts = paddle.to_tensor([comm.rank, 5.0]), paddle.to_tensor([1, 1])
    for function in (ap.global_scatter, ap.global_gather):
        plain = function(x, counts, counts, comm)
        assert function(x, counts, counts, comm, False).tolist() == plain.tolist() == ([0, 1], [5, 5])[comm.rank]
