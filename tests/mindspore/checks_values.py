"""Values, arguments and errors on the ranks of one job. Each check gets a communicator of its own."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore import distributed as dist

REPETITIONS = 400


def equal(tensor, expected) -> None:
    expected = np.asarray(expected)
    assert tuple(tensor.shape) == expected.shape
    np.testing.assert_array_equal(tensor.astype(ms.float32).asnumpy(), expected.astype(np.float32))


def check_views_and_pending_inputs(comm: Communicator) -> None:
    base = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * comm.rank)
    both = [np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * j for j in range(2)]
    sends = [6, 6]
    part = slice(0, 6) if comm.rank == 0 else slice(6, 12)
    for view in (lambda t: t.T, lambda t: (t * 1).T, lambda t: t.reshape(4, 3)):
        expected = np.concatenate([view(b).reshape(-1)[part] for b in both])
        equal(am.all_to_all_v(view(base), sends, sends, unit="element", group=comm), expected)
    equal(
        am.all_to_all_v(base[1:], [4, 4], [4, 4], unit="element", group=comm),
        np.concatenate([b[1 + comm.rank] for b in both]),
    )
    big = Tensor(np.ones((300, 300), np.float32))
    for step in range(20):
        pending = ops.matmul(big, big)[0, :4] * 0 + (step + 100 * comm.rank)
        equal(am.all_to_all_v(pending, [2, 2], [2, 2], group=comm), [step, step, step + 100, step + 100])


def check_output_is_safe_for_consumers(comm: Communicator) -> None:
    """Built-in operators right after ours, also while earlier ones are pending; no value may be wrong."""
    big = Tensor(np.ones((200, 200), np.float32))
    for dtype in (ms.float32, ms.bfloat16):
        ones = Tensor(np.ones(4096, np.float32)).astype(dtype)
        numbers = ones.asnumpy().dtype
        wrong = 0
        for step in range(REPETITIONS):
            mine = step % 100 + comm.rank
            if step % 16 == 0:
                ops.matmul(big, big)
                x = ones * float(mine)
            else:
                x = Tensor.from_numpy(np.full(4096, mine, numbers))
            # The output itself is gone at once, its consumer may be pending.
            y = am.all_to_all_v(x, [2048, 2048], [2048, 2048], group=comm) + 1
            got = y.asnumpy().astype(np.float32).reshape(2, -1)
            wrong += not (got == [[step % 100 + 1], [step % 100 + 2]]).all()
        assert wrong == 0, f"{wrong} of {REPETITIONS} in {dtype}"


def check_given_output_is_safe(comm: Communicator) -> None:
    """MindSpore may still have to initialize the output, or to read what it held."""
    big, ones = Tensor(np.ones((150, 150), np.float32)), Tensor(np.ones(500, np.float32))
    wrong = 0
    for step in range(REPETITIONS // 4):
        slow = ops.matmul(big, big).reshape(-1)[:1000] * 0
        out = slow + 7
        before = out + slow
        am.all_gather_into_tensor(out, ones * float(step + comm.rank), group=comm)
        after = out * 2
        wrong += not (before.asnumpy() == 7).all()
        wrong += not (after.asnumpy().reshape(2, -1) == [[2 * step], [2 * step + 2]]).all()
    assert wrong == 0


def check_parts_and_scalars(comm: Communicator) -> None:
    large = ops.zeros((3, 2))
    am.all_to_all_single(large[1:], Tensor(np.full((2, 2), comm.rank, np.float32)), group=comm)
    equal(large, [[0, 0], [0, 0], [1, 1]])
    outputs = [ops.zeros((1, 1)), ops.zeros((1, 1))]
    am.all_to_all(outputs, [Tensor(np.float32(10 * j + comm.rank)) for j in range(2)], group=comm)
    equal(ops.concat(outputs), [[10 * comm.rank], [10 * comm.rank + 1]])


def check_errors(comm: Communicator) -> None:
    """Those that tests/matrix does not have, and MindSpore's texts."""
    x, out = ops.zeros((2, 2)), ops.zeros((4, 2))
    no_bool = "The argument 'async_op' must be a bool, but got <class 'int'>."
    for call, kind, text in (
        (
            lambda: am.all_gather_into_tensor(out, [1.0], group=comm),
            TypeError,
            "tensor, but got <class 'list'>: input_",
        ),
        (lambda: am.all_gather_into_tensor([1.0], x, group=comm), TypeError, "but got <class 'list'>: output_tensor"),
        (lambda: am.all_gather_into_tensor(out, x, group="nowhere"), InvalidParamError, "'nowhere', expected a name"),
        (lambda: am.all_gather_into_tensor(out, x, group=comm, async_op=1), TypeError, no_bool),
        (lambda: am.all_to_all_single(out, x, group=comm, async_op=1), TypeError, no_bool),
        (lambda: am.barrier(comm, 1), TypeError, no_bool),
        (lambda: am.all_gather([x], x, comm), InvalidParamError, "tensor_list has 1 tensors"),
        (lambda: am.all_gather(out, x, comm), TypeError, "Expected list or tuple"),
        (lambda: am.all_to_all([1, 2], [x, x], comm), TypeError, "Expected tensor"),
        (lambda: am.reduce_scatter(ops.ones(3), [ops.ones(2)] * 2, group=comm), InvalidTensorError, "has 3 elements"),
        (lambda: am.reduce_scatter_tensor(ops.ones(2), ops.ones(3), group=comm), InvalidTensorError, "2 times the 2"),
        (lambda: am.all_reduce(x, "mean", comm), InvalidParamError, "mean"),
        (lambda: am.broadcast([1.0], 0, comm), TypeError, "Expected tensor"),
        (lambda: am.reduce(x, 2, group=comm), InvalidParamError, "dst is 2, expected 0 <= dst < 2"),
        (lambda: am.gather(x, [x, x], 2, comm), InvalidParamError, "dst is 2, expected 0 <= dst < 2"),
        (lambda: am.scatter(x, [x, x], 2, comm), InvalidParamError, "src is 2, expected 0 <= src < 2"),
        (lambda: am.broadcast(x, 2, comm), InvalidParamError, "src is 2, expected 0 <= src < 2"),
        (lambda: dist.gather(x, [x, x], "1", comm), TypeError, "The dst must be int"),
        (lambda: am.new_group(3), TypeError, "ranks must be list"),
        (lambda: am.all_to_all_v(x, [1, 1], capacity=2, group=comm), InvalidTensorError, "input lies on cpu, expected"),
        (lambda: am.all_to_all_v(x, [1, 1], capacity=2, out=out, group=comm), InvalidParamError, "a call without out"),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            call()
    am.barrier(comm)


def check_experts_rows_of_every_dtype(comm: Communicator) -> None:
    """Rows of two experts are put in order on both ranks."""
    rows = 10.0 * comm.rank + np.arange(4.0).repeat(3).reshape(4, 3)
    for dtype in (ms.bfloat16, ms.bool_, ms.complex64, ms.uint16):
        x = Tensor(rows.astype(np.float32)).astype(dtype)
        scattered = am.global_scatter(x, [1, 1, 1, 1], [1, 1, 1, 1], group=comm)
        theirs = [[2.0 * comm.rank + expert + 10 * card for card in (0, 1)] for expert in (0, 1)]
        equal(
            scattered, Tensor(np.float32(theirs).reshape(4, 1).repeat(3, 1)).astype(dtype).astype(ms.float32).asnumpy()
        )
        equal(am.global_gather(scattered, [1, 1, 1, 1], [1, 1, 1, 1], group=comm), x.astype(ms.float32).asnumpy())
