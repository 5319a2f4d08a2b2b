"""The examples in the documentation of torch's all_to_all and Paddle's alltoall_single, global_scatter, global_gather.

The numbers are those that the frameworks themselves produce, which is not always what their pages print.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidTensorError
from alltoallv.testing import reference

Array = npt.NDArray[Any]
Launch = Callable[..., list[Any]]


def assert_same(actual: Array, expected: Any, dtype: Any) -> None:
    assert actual.dtype == dtype
    assert actual.tolist() == expected


# --- paddle.distributed.alltoall_single ------------------------------------------------------------------------------


def paddle_single(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    data = np.arange(2) + rank * 2
    output = np.empty(2, np.int64)
    av.all_to_all_single(output, data, group=communicator)
    assert_same(output, [[0, 2], [1, 3]][rank], np.int64)

    in_split_sizes = [i + 1 for i in range(size)]
    out_split_sizes = [rank + 1 for _ in range(size)]
    data = np.ones((sum(in_split_sizes), size), np.float32) * rank
    output = np.empty(((rank + 1) * size, size), np.float32)
    work = av.all_to_all_single(output, data, out_split_sizes, in_split_sizes, communicator, async_op=True)
    assert work is not None
    work.wait()
    expected = [[[0, 0], [1, 1]], [[0, 0], [0, 0], [1, 1], [1, 1]]]
    assert_same(output, expected[rank], np.float32)

    # The page's rows of one source are all alike; different ones show their order too.
    data = (np.arange(6) + 10 * rank).reshape(3, 2).astype(np.float32)
    av.all_to_all_single(output, data, out_split_sizes, in_split_sizes, communicator)
    expected = [[[0, 1], [10, 11]], [[2, 3], [4, 5], [12, 13], [14, 15]]]
    assert_same(output, expected[rank], np.float32)


def test_paddle_alltoall_single(launch: Launch) -> None:
    launch(2, paddle_single)


# --- torch.distributed.all_to_all ------------------------------------------------------------------------------------

INPUT_SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
OUTPUT_SPLITS = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
INPUTS = [list(range(0, 6)), list(range(10, 19)), list(range(20, 25)), list(range(30, 37))]
OUTPUTS = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]


def split(array: Array, sizes: list[int]) -> list[Array]:
    return np.split(array, np.cumsum(sizes)[:-1])


def torch_even(communicator: Communicator) -> None:
    rank = communicator.rank
    inputs = np.split(np.arange(4) + rank * 4, 4)
    outputs = np.split(np.empty(4, np.int64), 4)
    assert av.all_to_all(outputs, inputs, communicator) is None
    for j, output in enumerate(outputs):
        assert_same(output, [j * 4 + rank], np.int64)


def torch_uneven(communicator: Communicator) -> None:
    rank = communicator.rank
    inputs = split(np.array(INPUTS[rank]), INPUT_SPLITS[rank])
    outputs = split(np.empty(sum(OUTPUT_SPLITS[rank]), np.int64), OUTPUT_SPLITS[rank])
    work = av.all_to_all(outputs, inputs, communicator, async_op=True)
    assert work is not None
    work.wait()
    for output, expected in zip(outputs, OUTPUTS[rank], strict=True):
        assert_same(output, expected, np.int64)
    # The same data with counts, and with counts that are learnt.
    flat = [value for part in OUTPUTS[rank] for value in part]
    for counts in (OUTPUT_SPLITS[rank], None):
        output = av.all_to_all_v(INPUTS[rank], INPUT_SPLITS[rank], counts, group=communicator)
        assert_same(output, flat, np.int64)
    assert_same(av.exchange_counts(INPUT_SPLITS[rank], communicator), OUTPUT_SPLITS[rank], np.int64)


def complex_inputs(rank: int) -> list[Array]:
    values = np.array([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], np.complex64) + 4 * rank * np.complex64(1 + 1j)
    return np.split(values, 4)


def torch_complex(communicator: Communicator) -> None:
    rank = communicator.rank
    inputs = complex_inputs(rank)
    outputs = np.split(np.zeros(4, np.complex64), 4)
    av.all_to_all(outputs, inputs, communicator)
    for j, output in enumerate(outputs):
        n = 4 * j + rank + 1
        assert_same(output, [complex(n, n)], np.complex64)


def torch_complex_as_printed(communicator: Communicator) -> None:
    """The page receives complex numbers in int64 tensors. torch refuses that, and so do we; on all ranks."""
    outputs = np.split(np.full(4, -1), 4)
    with pytest.raises(ValueError, match=r"^Invalid usage of .* different dtypes: complex64, int64$") as caught:
        av.all_to_all(outputs, complex_inputs(communicator.rank), communicator)
    assert isinstance(caught.value, InvalidTensorError)
    assert all(output.tolist() == [-1] for output in outputs)
    torch_complex(communicator)  # the communicator is as good as before


def torch_scatters(communicator: Communicator) -> None:
    """The page: "Essentially, it is similar to following operation", a scatter from every rank."""
    rank, size = communicator.rank, communicator.size
    inputs = split(np.array(INPUTS[rank]), INPUT_SPLITS[rank])
    for source in range(size):
        counts = [0] * size
        counts[source] = OUTPUT_SPLITS[rank][source]
        sends = INPUT_SPLITS[rank] if rank == source else [0] * size
        x = np.concatenate(inputs) if rank == source else np.empty(0, np.int64)
        assert_same(av.all_to_all_v(x, sends, counts, group=communicator), OUTPUTS[rank][source], np.int64)


@pytest.mark.parametrize(
    "example",
    [torch_even, torch_uneven, torch_complex, torch_complex_as_printed, torch_scatters],
    ids=lambda example: example.__name__,
)
def test_torch_all_to_all(launch: Launch, example: Callable[[Communicator], None]) -> None:
    launch(4, example)


def test_complex_dtypes_that_one_rank_alone_gets_wrong(launch: Launch) -> None:
    def run(communicator: Communicator) -> None:
        dtype = np.int64 if communicator.rank == 3 else np.complex64
        where = "^" if communicator.rank == 3 else "failed on rank 3: "
        with pytest.raises(InvalidTensorError, match=where + "Invalid usage of tensors with different dtypes"):
            av.all_to_all(np.split(np.zeros(4, dtype), 4), complex_inputs(communicator.rank), communicator)
        torch_complex(communicator)

    launch(4, run)


# --- paddle.distributed.utils.global_scatter and global_gather -------------------------------------------------------

LOCAL_COUNTS = GLOBAL_COUNTS = [[2, 1, 1, 1], [1, 1, 2, 1]]
BUFFER = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
GATHERED = [[[1, 2], [3, 4], [7, 8], [1, 2], [7, 8]], [[5, 6], [9, 10], [3, 4], [5, 6], [9, 10]]]
SCATTERED = [[[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]], [[7, 8], [5, 6], [7, 8], [9, 10], [9, 10]]]


def paddle_experts(communicator: Communicator) -> None:
    rank = communicator.rank
    local, counts = np.array(LOCAL_COUNTS[rank]), np.array(GLOBAL_COUNTS[rank])
    x = np.array(BUFFER, np.float32)
    assert_same(av.global_gather(x, local, counts, communicator), GATHERED[rank], np.float32)
    scattered = av.global_scatter(x, local, counts, communicator)
    assert_same(scattered, SCATTERED[rank], np.float32)
    assert_same(av.global_gather(scattered, local, counts, communicator), BUFFER, np.float32)
    # The page's gradient of sum(gather(x)**2): the scatter of 2 * gather(x), which is 2 * x.
    gathered = av.global_gather(x, local, counts, communicator)
    gradient = av.global_scatter(2 * gathered, local, counts, communicator)
    assert_same(gradient, (2 * x).tolist(), np.float32)


def test_paddle_global_scatter_and_gather(launch: Launch) -> None:
    launch(2, paddle_experts)


def test_the_reference_agrees_with_the_pages() -> None:
    inputs = [np.array(BUFFER, np.float32)] * 2
    for rank in range(2):
        gathered = reference.global_gather(inputs, LOCAL_COUNTS, GLOBAL_COUNTS)[rank]
        assert_same(gathered, GATHERED[rank], np.float32)
        scattered = reference.global_scatter(inputs, LOCAL_COUNTS, GLOBAL_COUNTS)[rank]
        assert_same(scattered, SCATTERED[rank], np.float32)
    lists = [split(np.array(INPUTS[r]), INPUT_SPLITS[r]) for r in range(4)]
    for rank, outputs in enumerate(reference.all_to_all(lists)):
        assert [output.tolist() for output in outputs] == OUTPUTS[rank]
