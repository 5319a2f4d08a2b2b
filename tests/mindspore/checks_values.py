"""Values, arguments and errors on the ranks of one job. Each check gets a communicator of its own."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError

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


def check_argument_types(comm: Communicator) -> None:
    x, out = ops.zeros((2, 2)), ops.zeros((4, 2))
    for output, input, name in ((out, [1.0], "input"), ([1.0], x, "output")):
        with pytest.raises(TypeError, match=f"Expected tensor, but got <class .list.>: {name}_tensor"):
            am.all_gather_into_tensor(output, input, group=comm)
    with pytest.raises(TypeError) as info:
        am.all_gather_into_tensor(out, x, group=1)
    assert str(info.value) == "The argument 'group' must be type of string, but got 'group' type : <class 'int'>."
    for call in (am.all_gather_into_tensor, am.all_to_all_single):
        with pytest.raises(TypeError) as info:
            call(out, x, group=comm, async_op=1)
        assert str(info.value) == "The argument 'async_op' must be a bool, but got <class 'int'>."
    with pytest.raises(InvalidParamError, match="'nowhere'"):
        am.all_gather_into_tensor(out, x, group="nowhere")


def check_all_to_all_of_mixed_shapes(comm: Communicator) -> None:
    """A scalar may meet [1, 1]: what arrives keeps the shape of the receiver's tensor."""
    r = comm.rank
    if r == 0:
        inputs = [Tensor(np.full((2, 2), 5, np.float32)), Tensor(np.float32(7))]
        outputs = [ops.zeros((4,)), ops.zeros((3, 1))]
    else:
        inputs = [Tensor(np.array([1, 2, 3], np.float32)), Tensor(np.zeros((0, 3), np.float32))]
        outputs = [ops.zeros((1, 1)), ops.zeros((0,))]
    assert am.all_to_all(outputs, inputs, group=comm) is None
    equal(outputs[0], [5, 5, 5, 5] if r == 0 else [[7]])
    equal(outputs[1], [[1], [2], [3]] if r == 0 else np.zeros(0))
    handle = am.all_to_all(outputs, inputs, group=comm, async_op=True)
    handle.wait()
    equal(outputs[0], [5, 5, 5, 5] if r == 0 else [[7]])
    with pytest.raises(TypeError):
        am.all_to_all([1, 2], inputs, group=comm)


def check_an_output_is_part_of_a_larger_tensor(comm: Communicator) -> None:
    large = ops.zeros((3, 2))
    am.all_to_all_single(large[1:], Tensor(np.full((2, 2), comm.rank, np.float32)), group=comm)
    equal(large, [[0, 0], [0, 0], [1, 1]])


def check_default_group_and_names(comm: Communicator) -> None:
    out = ops.zeros((2,))
    x = Tensor(np.array([comm.rank + 1], np.float32))
    for group in (None, am.new_group(), am.new_group([1, 0]), am.new_group(list(range(comm.size)))):
        out = ops.zeros((2,))
        am.all_gather_into_tensor(out, x, group=group)
        equal(out, [1, 2])
    alone = [am.new_group([0]), am.new_group([1])]
    out = ops.zeros((1,))
    am.all_gather_into_tensor(out, x, group=alone[comm.rank])
    equal(out, [comm.rank + 1])
    with pytest.raises(InvalidParamError, match="is none"):
        am.all_gather_into_tensor(out, x, group=alone[1 - comm.rank])
    with pytest.raises(TypeError):
        am.new_group(3)
    with pytest.raises(InvalidParamError):
        am.new_group([0, 2])


def check_outputs_outlive_their_communicator(comm: Communicator) -> None:
    with Communicator.from_env(domain="short", timeout=20) as short:
        y = am.all_to_all_v(Tensor(np.arange(2000, dtype=np.float32)), [1000, 1000], [1000, 1000], group=short)
    first = 1000 * comm.rank
    equal(y, [*range(first, first + 1000)] * 2)
