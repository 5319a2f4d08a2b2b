"""Tensors in the shared arena behave as any others, and their memory comes back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import alltoallv.torch as at
from alltoallv import Communicator, _core
from alltoallv.errors import AllToAllVError, InvalidTensorError, OutOfMemoryError
from alltoallv.torch.eager.tensors import MOVABLE

MB = 1 << 20


def in_arena(tensor: Tensor) -> bool:
    return _core.in_arena(tensor.data_ptr(), tensor.nbytes)


def allocated() -> Tensor:
    return at.empty((3, 4)).copy_(torch.arange(12.0).view(3, 4))


def received() -> Tensor:
    """The output of a call, which the core makes."""
    (comm,) = Communicator.threads(1)
    try:
        return at.all_to_all_v(torch.arange(12.0).view(3, 4), [3], [3], unit="row", group=comm)
    finally:
        comm.destroy()


@pytest.fixture(params=[allocated, received])
def made(request: pytest.FixtureRequest) -> Callable[[], Tensor]:
    def make() -> Tensor:
        x: Tensor = request.param()
        assert in_arena(x)
        return x

    return make


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.deepcopy,
    "torch.save": saved,
    "clone": torch.clone,
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "cat": lambda x: torch.cat([x]),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_ordinary_tensors(made: Callable[[], Tensor], how: str) -> None:
    x = made()
    y = COPIES[how](x)
    assert torch.equal(x, y)
    assert not in_arena(y)
    y.add_(1)
    assert x[0, 0] == 0
    assert torch.equal(x.view(-1)[3:7].clone(), torch.arange(3.0, 7.0))


def test_kind() -> None:
    for dtype in MOVABLE:
        x = at.empty((2, 3), dtype)
        assert (x.dtype, x.shape, x.is_contiguous(), x.device.type) == (dtype, (2, 3), True, "cpu")
        assert not x.requires_grad
        assert not x.is_pinned()
        assert not x.is_shared()
        assert x.data_ptr() % 64 == 0
    assert at.empty(5).dtype == torch.get_default_dtype()
    assert at.empty(5).shape == (5,)
    assert at.empty((0, 3)).shape == (0, 3)
    assert at.empty(()).shape == ()


def test_a_parameter_in_the_arena_is_trained(made: Callable[[], Tensor]) -> None:
    parameter = torch.nn.Parameter(made())
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    (parameter * 2).sum().backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.arange(12.0).view(3, 4) - 1)
    assert in_arena(parameter)


def test_storage(made: Callable[[], Tensor]) -> None:
    """Shrinking and views work; growing in place, as documented, does not; moving to torch's shared memory does."""
    x = made()
    assert x.untyped_storage().nbytes() == 48
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="not resizable"):
        x.resize_(1000)
    x = made()
    x.set_(torch.ones(5))
    assert x.tolist() == [1] * 5
    x = made()
    x.share_memory_()
    assert x.is_shared()
    assert not in_arena(x)
    assert torch.equal(x, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers_read_them(made: Callable[[], Tensor], context: str) -> None:
    """Forked workers see the arena itself; for spawned ones torch moves any tensor to shared memory of its own."""
    x = made()
    dataset = TensorDataset(x, torch.arange(3))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    assert torch.equal(torch.cat([rows for rows, _ in batches]), x)
    assert in_arena(x) == (context == "fork")


@on_ranks(2)
def test_memory_returns(comm: Communicator) -> None:
    def used() -> int:
        gc.collect()
        return comm.stats()["arena_used_bytes"]

    x, before = torch.ones(2 * MB), used()
    y = at.all_to_all_v(x, [MB, MB], [MB, MB], group=comm)
    assert used() >= before + 8 * MB
    view = y[5:7]
    del y
    assert used() >= before + 8 * MB  # a view keeps it
    del view
    assert used() == before
    segments = comm.stats()["arena_segments"]
    for _ in range(50):  # 400 MB if nothing came back
        at.all_to_all_v(x, [MB, MB], group=comm)
    assert comm.stats()["arena_segments"] <= segments + 1
    assert used() == before
    kept = [at.all_to_all_v(x, [MB, MB], [MB, MB], group=comm) for _ in range(2)]
    assert used() >= before + 16 * MB
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert used() == before
    leaf = x.requires_grad_()
    (at.all_to_all_v(leaf, [MB, MB], group=comm) ** 2).sum().backward()
    leaf.grad = None
    assert used() == before


class Resizes:
    """A count that changes a tensor while it is read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def __index__(self) -> int:
        self._change()
        return 1 << 20


@on_ranks(2)
def test_tensors_that_end_beyond_their_storage(comm: Communicator) -> None:
    """An error that both ranks raise, in every way to give one; the next call works."""

    def short(numel: int, step: int = 1) -> torch.Tensor:
        made = torch.ones(numel * step)[::step]
        made.untyped_storage().resize_(64)
        return made

    n = 1 << 20
    calls: list[Callable[[bool], object]] = [
        lambda odd: at.all_to_all_v(short(2 * n) if odd else torch.ones(2 * n), [n, n], [n, n], group=comm),
        lambda odd: at.all_to_all_v(
            torch.ones(2 * n), [n, n], [n, n], out=short(2 * n) if odd else torch.ones(2 * n), group=comm
        ),
        lambda odd: at.all_reduce(short(n) if odd else torch.ones(n), group=comm),
        lambda odd: at.all_reduce(short(n, 2) if odd else torch.ones(n), group=comm),
        lambda odd: at.all_gather_into_tensor(torch.ones(2 * n), short(n) if odd else torch.ones(n), group=comm),
        lambda odd: at.all_to_all_single(torch.ones(2 * n), short(2 * n) if odd else torch.ones(2 * n), group=comm),
        lambda odd: at.quantized_all_reduce(short(n) if odd else torch.ones(n), group=comm),
        lambda odd: at.Plan([n, n], [n, n], group=comm)(short(2 * n) if odd else torch.ones(2 * n)),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(InvalidTensorError, match=r"a storage of 64 bytes.*A2A-2121"):
            call(comm.rank == 1)
        at.all_reduce(x := torch.ones(3), group=comm)
        assert x.tolist() == [2] * 3, number


@on_ranks(2)
def test_no_memory_for_a_copy_of_an_input(comm: Communicator) -> None:
    """A RuntimeError of torch, which peers get as what it is."""
    x = torch.ones(1).expand(1 << 46) if comm.rank else torch.ones(4)
    for _ in range(2):
        with pytest.raises(RuntimeError if comm.rank else OutOfMemoryError, match="can't allocate memory"):
            at.all_to_all_v(x, [x.numel() // 2] * 2, group=comm)
        at.all_reduce(y := torch.ones(3), group=comm)
        assert y.tolist() == [2] * 3


@on_ranks(2)
def test_counts_that_change_the_tensors(comm: Communicator) -> None:
    n = 1 << 20
    for way in range(3):
        x, out = torch.ones(2 * n), torch.ones(2 * n)
        tensor = out if way == 2 else x

        def change(tensor: torch.Tensor = tensor, way: int = way) -> None:
            tensor.resize_(4) if way == 1 else tensor.untyped_storage().resize_(64)

        last = Resizes(change) if comm.rank == 1 else n
        with pytest.raises(AllToAllVError, match=r"storage of 64 bytes|changed while.*A2A-1029"):
            at.all_to_all_v(x, [n, n], [n, last], out=out, group=comm)
        at.all_reduce(y := torch.ones(3), group=comm)
        assert y.tolist() == [2] * 3
