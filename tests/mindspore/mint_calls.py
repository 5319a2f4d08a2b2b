"""A call of each name of mint.distributed on CPU, by 2 ranks: what it gives against NumPy, and what it refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from mindspore.communication import comm_func
from mindspore.ops.function import comm_func as functions

from alltoallv.mindspore import distributed as ours
from alltoallv.mindspore import tensors

OBJECTS = [{"a": 1}, ("b", None, "long" * 1000)]


def given(rank: int, rows: int = 2) -> np.ndarray:
    """The values of a rank: [rows, 3], other ones on every rank."""
    return np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 100 * (rank + 1)


def equal(tensor: Tensor, expected: Any) -> None:
    np.testing.assert_array_equal(tensor.asnumpy(), expected)


def ended(handle: Any) -> None:
    assert all(isinstance(handle, module.CommHandle) for module in (comm_func, functions))
    assert handle.wait() is None


def call_init_process_group(d: Any, r: int, other: int) -> None:
    assert d.init_process_group() is None
    d.init_process_group(timeout=timedelta(seconds=30), world_size=2)
    with pytest.raises(ValueError, match="world_size"):
        d.init_process_group(world_size=5)
    with pytest.raises(ValueError, match="hccl"):
        d.init_process_group("nccl")
    with pytest.raises(TypeError):
        d.init_process_group(init_method=1)


def call_is_available(d: Any, r: int, other: int) -> None:
    assert d.is_available() is True


def call_is_initialized(d: Any, r: int, other: int) -> None:
    assert d.is_initialized() is True


def call_get_rank(d: Any, r: int, other: int) -> None:
    assert d.get_rank() == r
    with pytest.raises(TypeError):
        d.get_rank(1)


def call_get_world_size(d: Any, r: int, other: int) -> None:
    assert d.get_world_size() == 2


def call_new_group(d: Any, r: int, other: int) -> None:
    name = d.new_group([1, 0], timeout=1, pg_options=None, use_local_synchronization=True, group_desc="x")
    assert name.startswith("hccl_2_")
    assert d.new_group([0, 1]) == name
    alone = d.new_group([0], backend="mccl")
    assert alone.startswith("mccl_1_") if r == 0 else alone == ""
    assert d.get_rank(alone) == (0 if r == 0 else -1)
    assert d.get_world_size(alone) == (1 if r == 0 else -1)
    x = Tensor(given(r))
    d.all_reduce(x, group=name)
    equal(x, given(0) + given(1))
    for ranks, options in ((1, {}), ([0], {"backend": "x"}), ([0], {"pg_options": 1})):
        with pytest.raises(TypeError):
            d.new_group(ranks, **options)
    with pytest.raises(ValueError, match="ranks"):
        d.new_group([r, 9])
    with pytest.raises(ValueError, match="ranks"):
        d.new_group([0, 0])


def call_get_backend(d: Any, r: int, other: int) -> None:
    assert d.get_backend() == "hccl"
    assert d.get_backend(d.new_group([0, 1], backend="mccl")) == "mccl"


def call_get_global_rank(d: Any, r: int, other: int) -> None:
    assert d.get_global_rank(d.new_group([r]), 0) == r
    assert d.get_global_rank(None, 1) == 1


def call_get_group_rank(d: Any, r: int, other: int) -> None:
    assert d.get_group_rank(d.new_group([r]), r) == 0
    with pytest.raises(TypeError):
        d.get_group_rank(None, "x")


def call_get_process_group_ranks(d: Any, r: int, other: int) -> None:
    assert d.get_process_group_ranks() == [0, 1]
    assert d.get_process_group_ranks(d.new_group([r])) == [r]


def call_all_reduce(d: Any, r: int, other: int) -> None:
    for op, combine in (("sum", np.add), ("prod", np.multiply), ("min", np.minimum), ("max", np.maximum)):
        x = Tensor(given(r))
        assert d.all_reduce(x, op) is None
        equal(x, combine(given(0), given(1)))
    x = Tensor(given(r))
    ended(d.all_reduce(x, async_op=True))
    equal(x, given(0) + given(1))
    for arguments in ((1,), (x, 1), (x, "test"), (x, "sum", 1), (x, "sum", None, 1)):
        with pytest.raises(TypeError):
            d.all_reduce(*arguments)


def call_all_gather(d: Any, r: int, other: int) -> None:
    outs = [ops.zeros((1, 3)), ops.zeros((2, 3))]
    assert d.all_gather(outs, Tensor(given(r, r + 1))) is None
    for j in range(2):
        equal(outs[j], given(j, j + 1))
    with pytest.raises(TypeError):
        d.all_gather(outs[:1], Tensor(given(r)))
    with pytest.raises(TypeError):
        d.all_gather([ops.zeros((9, 3))] * 2, Tensor(given(r)))


def call_all_gather_into_tensor(d: Any, r: int, other: int) -> None:
    out = ops.zeros((4, 3))
    ended(d.all_gather_into_tensor(out, Tensor(given(r)), async_op=True))
    equal(out, np.concatenate([given(0), given(1)]))
    with pytest.raises(ValueError, match="output_tensor"):
        d.all_gather_into_tensor(ops.zeros((2, 3)), Tensor(given(r)))
    with pytest.raises(TypeError):
        d.all_gather_into_tensor([1], Tensor(given(r)))


def call_all_gather_into_tensor_uneven(d: Any, r: int, other: int) -> None:
    out, even = ops.zeros((3, 3)), ops.zeros((4, 3))
    assert d.all_gather_into_tensor_uneven(out, Tensor(given(r, r + 1)), [1, 2]) is None
    equal(out, np.concatenate([given(0, 1), given(1, 2)]))
    ended(d.all_gather_into_tensor_uneven(even, Tensor(given(r)), async_op=True))
    equal(even, np.concatenate([given(0), given(1)]))
    with pytest.raises(ValueError, match="output_split_sizes"):
        d.all_gather_into_tensor_uneven(out, Tensor(given(r)), [1, 1])
    if d is ours and not tensors.queued:  # a gradient into a given output is not for Ascend
        w = Tensor(np.arange(9, dtype=np.float32).reshape(3, 3))

        def loss(x: Tensor) -> Tensor:
            out = ops.zeros((3, 3))
            d.all_gather_into_tensor_uneven(out, x, [1, 2])
            return (out * w).sum() * (r + 1)

        equal(ms.grad(loss)(Tensor(given(r, r + 1))), 3 * w.asnumpy()[r : 2 * r + 1])


def call_reduce_scatter(d: Any, r: int, other: int) -> None:
    out = ops.zeros((r + 1, 3))
    assert d.reduce_scatter(out, [Tensor(given(r, 1)), Tensor(given(r, 2))]) is None
    equal(out, given(0, r + 1) + given(1, r + 1))
    with pytest.raises(TypeError):
        d.reduce_scatter(out, [out])


def call_reduce_scatter_tensor(d: Any, r: int, other: int) -> None:
    out = ops.zeros((1, 3))
    ended(d.reduce_scatter_tensor(out, Tensor(given(r)), "max", async_op=True))
    equal(out, np.maximum(given(0), given(1))[r : r + 1])
    with pytest.raises(TypeError):
        d.reduce_scatter_tensor(out, Tensor(given(r)), op="x")


def call_reduce_scatter_tensor_uneven(d: Any, r: int, other: int) -> None:
    out, even = ops.zeros((r + 1, 3)), ops.zeros((2, 3))
    assert d.reduce_scatter_tensor_uneven(out, Tensor(given(r, 3)), [1, 2]) is None
    equal(out, (given(0, 3) + given(1, 3))[r : 2 * r + 1])
    ended(d.reduce_scatter_tensor_uneven(even, Tensor(given(r, 4)), async_op=True))
    equal(even, (given(0, 4) + given(1, 4))[2 * r : 2 * r + 2])
    with pytest.raises(TypeError):
        d.reduce_scatter_tensor_uneven(out, Tensor(given(r, 3)), [1, 2], "prod")


def call_reduce(d: Any, r: int, other: int) -> None:
    x = Tensor(given(r))
    assert d.reduce(x, 1) is None
    equal(x, given(0) + given(1) if r == 1 else given(0))
    with pytest.raises(TypeError):
        d.reduce(x, "1")


def call_gather(d: Any, r: int, other: int) -> None:
    outs = [ops.zeros((2, 3)), ops.zeros((2, 3))]
    assert d.gather(Tensor(given(r)), outs, dst=1) is None
    for j in range(2):
        equal(outs[j], given(j) if r == 1 else np.zeros((2, 3)))
    with pytest.raises(TypeError):
        d.gather(Tensor(given(r)), [1, 2])
    with pytest.raises(TypeError):
        d.gather(Tensor(given(r)), [outs[0], ops.zeros(6)])


def call_scatter(d: Any, r: int, other: int) -> None:
    out = ops.zeros((2, 3))
    ended(d.scatter(out, [Tensor(given(r)), Tensor(given(r + 10))], src=1, async_op=True))
    equal(out, given(1 + 10 * r))
    with pytest.raises(TypeError):
        d.scatter(out, [out], src=r)


def call_broadcast(d: Any, r: int, other: int) -> None:
    x = Tensor(given(r))
    assert d.broadcast(x, 1) is None
    equal(x, given(1))
    with pytest.raises(TypeError):
        d.broadcast(x, "0")


def call_barrier(d: Any, r: int, other: int) -> None:
    assert d.barrier() is None
    ended(d.barrier(async_op=True))


def call_all_to_all(d: Any, r: int, other: int) -> None:
    outs = [ops.zeros((2, 3)), ops.zeros(6)]
    assert d.all_to_all(outs, [Tensor(given(r)), Tensor(given(r + 10))]) is None
    equal(outs[0], given(10 * r))
    equal(outs[1], given(1 + 10 * r).reshape(-1))


def call_all_to_all_single(d: Any, r: int, other: int) -> None:
    out = ops.zeros((2 * (r + 1), 3))
    assert d.all_to_all_single(out, Tensor(given(r, 3)), [r + 1] * 2, [1, 2]) is None
    equal(out, np.concatenate([given(j, 3)[r : 2 * r + 1] for j in range(2)]))
    with pytest.raises(ValueError, match="3"):
        d.all_to_all_single(ops.zeros((3, 3)), Tensor(given(r, 3)))


def call_send(d: Any, r: int, other: int) -> None:
    x = Tensor(given(r))
    if r == 0:
        assert d.send(x, other) is None
    else:
        assert d.recv(x, other) == 0
        equal(x, given(0))
    with pytest.raises(ValueError, match="this rank itself"):
        d.send(x, r)
    with pytest.raises(TypeError):
        d.send(x, "1")


def call_recv(d: Any, r: int, other: int) -> None:
    """With tags, in another order than they were sent."""
    x, y = Tensor(given(r)), Tensor(given(r + 10))
    if r == 1:
        d.isend(x, other, tag=1)
        d.send(y, other, tag=2)
    else:
        assert d.recv(y, other, tag=2) == 0
        assert d.recv(x, other, tag=1) == 0
        equal(x, given(1))
        equal(y, given(11))
    with pytest.raises(TypeError):
        d.recv([x], other)


def call_isend(d: Any, r: int, other: int) -> None:
    x, y = Tensor(given(r)), ops.zeros((2, 3))
    handles = [d.isend(x, other), d.irecv(y, other)]
    for handle in handles:
        ended(handle)
    equal(y, given(other))


call_irecv = call_isend


def call_P2POp(d: Any, r: int, other: int) -> None:
    with pytest.raises(TypeError):
        d.P2POp("send", Tensor(given(r)), other)
    with pytest.raises(TypeError):
        d.P2POp("isend", given(r), other)
    with pytest.raises(NotImplementedError):
        d.P2POp(d.isend, Tensor(given(r)), other, tag=1)
    assert d.P2POp(d.isend, Tensor(given(r)), other).peer == other


def call_batch_isend_irecv(d: Any, r: int, other: int) -> None:
    x, y, unused = Tensor(given(r)), ops.zeros((2, 3)), ops.zeros((2, 3))
    with pytest.raises(ValueError, match="dst is 2"):  # none of the batch is started
        d.batch_isend_irecv([d.P2POp(d.irecv, unused, other), d.P2POp(d.isend, x, 2)])
    (handle,) = d.batch_isend_irecv([d.P2POp(d.isend, x, other), d.P2POp("irecv", y, other)])
    ended(handle)
    equal(y, given(other))
    equal(unused, np.zeros((2, 3)))
    with pytest.raises(TypeError):
        d.batch_isend_irecv([])


def call_all_gather_object(d: Any, r: int, other: int) -> None:
    found = [None, None]
    d.all_gather_object(found, OBJECTS[r])
    assert found == OBJECTS
    with pytest.raises(TypeError):
        d.all_gather_object([None], 1)


def call_broadcast_object_list(d: Any, r: int, other: int) -> None:
    found = list(OBJECTS) if r == 1 else [None, None]
    d.broadcast_object_list(found, 1)
    assert found == OBJECTS
    with pytest.raises(TypeError):
        d.broadcast_object_list([])


def call_gather_object(d: Any, r: int, other: int) -> None:
    found = [None, None]
    d.gather_object(OBJECTS[r], found if r == 1 else None, dst=1)
    assert found == (OBJECTS if r == 1 else [None, None])


def call_scatter_object_list(d: Any, r: int, other: int) -> None:
    found = [None]
    d.scatter_object_list(found, OBJECTS if r == 1 else None, src=1)
    assert found == [OBJECTS[r]]


def call_send_object_list(d: Any, r: int, other: int) -> None:
    found = list(OBJECTS) if r == 0 else [None, None]
    if r == 0:
        assert d.send_object_list(found, other) is None
    else:
        assert d.recv_object_list(found, other) == 0
    assert found == OBJECTS


call_recv_object_list = call_send_object_list


def call_destroy_process_group(d: Any, r: int, other: int) -> None:
    """Afterwards the job can be joined again."""
    group = d.new_group([0, 1])
    d.destroy_process_group(group)
    d.destroy_process_group()
    assert d.is_initialized() is False
    assert d.get_rank() == -1
    d.init_process_group(timeout=timedelta(seconds=30))
    call_broadcast(d, r, other)


CALLS = {name: globals()[f"call_{name}"] for name in mint.distributed.__all__}
