"""torch.ops.symm_mem on CPU: what torch's own tests of these operators ask of them, on our group and on gloo's."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from backend_groups import Grouped
from documented import ROOT

from alltoallv import _core
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

EXPERTS, WIDTH = 3, 5  # of every rank; of a row
PAGE = ROOT / "docs/api/torch-symm-mem.md"


def operator(name: str) -> Any:

    importlib.import_module("alltoallv.torch.symm_mem")
    return attrgetter(f"ops.symm_mem.{name}")(torch)  # a function that names torch.ops cannot be pickled


def filled(values: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """In symmetric memory, with room for more rows."""
    importlib.import_module("alltoallv.torch.symm_mem")
    made = symm_mem.empty((rows or len(values), *values.shape[1:]), dtype=values.dtype, device="cpu").fill_(-1)
    made[: len(values)] = values
    return made


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return every


def one_dimension(rank: int, size: int, world: dist.ProcessGroup) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    splits = torch.randint(10, (size,))
    x = torch.randn(int(splits.sum()), WIDTH)
    expected_splits = torch.stack(gathered(splits))[:, rank].contiguous()
    expected = torch.empty(int(expected_splits.sum()), WIDTH)
    dist.all_to_all_single(expected, x, expected_splits.tolist(), splits.tolist())
    in_splits, told = filled(splits), filled(torch.zeros(2, size, dtype=torch.int64))
    inp, out = filled(x, 10 * size), filled(expected[:0], 20 * size)
    assert _core.in_arena(inp.data_ptr(), inp.nbytes)
    operator("all_to_all_vdev")(inp, out, in_splits, told, group)
    assert torch.equal(in_splits, splits)
    assert torch.equal(told[0], expected_splits)
    assert torch.equal(told[1], expected_splits.cumsum(0) - expected_splits)
    assert torch.equal(out[: len(expected)], expected)
    assert (out[len(expected) :] == -1).all()


def there_and_back(rank: int, size: int, world: dist.ProcessGroup, align: int) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    n = size * EXPERTS
    splits = torch.randint(6, (n,))
    splits[rank] = 0
    if align == 8:
        splits[1::EXPERTS] = 0  # an expert without rows
    x = torch.randn(int(splits.sum()), WIDTH)
    every_split = gathered(splits)
    every_x = [x.clone() for _ in range(size)]
    for source in range(size):
        every_x[source] = x.clone() if source == rank else torch.empty(int(every_split[source].sum()), WIDTH)
        dist.broadcast(every_x[source], source)
    in_splits, told = filled(splits), filled(torch.zeros(2, n, dtype=torch.int64))
    inp, out = filled(x, 6 * n), filled(x[:0], (6 + 16) * n)
    operator("all_to_all_vdev_2d")(inp, out, in_splits, told, group, major_align=align)
    at = i = 0
    for e in range(EXPERTS):
        begin = at
        for source in range(size):
            chunk = every_x[source].split(every_split[source].tolist())[rank * EXPERTS + e]
            assert told[:, i].tolist() == [len(chunk), at]
            assert torch.equal(out[at : at + len(chunk)], chunk)
            at, i = at + len(chunk), i + 1
        padded = begin + max(-(-(at - begin) // align), 1) * align
        assert (out[at:padded] == -1).all()
        at = padded
    back, told_back = filled(x[:0], 6 * n), torch.full((2, n), -1)
    operator("all_to_all_vdev_2d_offset")(out, back, told, told_back, group)
    assert torch.equal(told_back, torch.stack([splits, splits.cumsum(0) - splits]))
    assert torch.equal(back[: len(x)], x)
    assert (back[len(x) :] == -1).all()


def wrong(rank: int, size: int, world: dist.ProcessGroup) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    call, x, told = (operator("all_to_all_vdev_2d"), torch.zeros(2 * size), torch.zeros(2, size, dtype=torch.int64))
    splits = torch.ones(size, dtype=torch.int64)
    with pytest.raises(InvalidParamError, match=r"major_align is 0, expected at least 1.*A2A-1079"):
        call(x, x.clone(), splits, told, group, rank)
    with pytest.raises(InvalidTensorError, match=r"in_splits has shape.*A2A-2132"):
        call(x, x.clone(), torch.ones(size + (rank == 0), dtype=torch.int64), told, group)
    with pytest.raises(InvalidTensorError, match=r"in_splits is torch.*A2A-2131"):
        call(x, x.clone(), splits.int() if rank else splits, told, group)
    with pytest.raises((InvalidParamError, InvalidTensorError, PeerMismatchError)):  # more than there is, on all ranks
        call(x, x.clone(), splits * 3 if rank == 0 else splits, told, group)
    call(x, x.clone(), splits, told, group)  # still usable


@pytest.mark.parametrize("backend", ["alltoallv", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_vdev(grouped: Grouped, size: int, backend: str) -> None:
    grouped(size, backend=backend)(one_dimension)


@pytest.mark.parametrize("align", [1, 8, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_there_and_back(grouped: Grouped, size: int, align: int) -> None:
    grouped(size)(there_and_back, align)


def test_wrong_arguments(grouped: Grouped) -> None:
    grouped(2)(wrong)


def _values(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape, np.float32)


def _total(*parts: np.ndarray) -> np.ndarray:
    """Adds in the order of ranks, in float32."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def plain(rank: int, size: int, world: dist.ProcessGroup) -> None:
    """All operators that are offered, but the exchanges with counts, against NumPy."""
    symm, group, called = importlib.import_module("alltoallv.torch.symm_mem"), world.group_name, set()

    def call(name: str, *arguments: Any, **named: Any) -> Any:
        called.add(name)
        return operator(name)(*arguments, **named)

    def check(found: torch.Tensor, expected: np.ndarray) -> None:
        assert np.array_equal(found.numpy(), expected)

    every = [_values(r, 2 * size, 3 * size) for r in range(size)]
    total, average = _total(*every), _total(*every) / np.float32(size)
    x, out = filled(torch.from_numpy(every[rank])), filled(torch.zeros(2 * size, 3 * size))
    handle = symm_mem.rendezvous(x, world)
    handle.barrier()
    assert (handle.rank, handle.world_size, handle.device.type) == (rank, size, "cpu")
    with pytest.raises(NotImplementedError, match="get_buffer is not offered: here a rank"):
        handle.get_buffer(0, (1,), torch.float32)
    with pytest.raises(AttributeError, match="get_bufer"):
        handle.get_bufer()
    check(call("one_shot_all_reduce", x, "sum", group), total)
    check(call("one_shot_all_reduce", x, "avg", group), average)
    check(call("one_shot_all_reduce", x.bfloat16(), "sum", group).float(), _rounded(every))
    check(call("one_shot_all_reduce_out", x, "sum", group, out), total)
    check(call("one_shot_all_reduce_copy", out, x.T, "sum", group), total.T)
    check(out.view(3 * size, -1), every[rank].T)
    check(call("one_shot_all_reduce_copy_out", x.clone(), x, "avg", group, out), average)
    check(out, average)
    check(call("two_shot_all_reduce_out", x, "sum", group, out), total)
    check(x, every[rank])
    again = x.clone()
    assert call("two_shot_all_reduce_", again, "sum", group).data_ptr() == again.data_ptr()
    check(again, total)
    check(call("reduce_scatter_out", x, group, False, torch.empty(2, 3 * size)), np.split(total, size)[rank])
    check(call("reduce_scatter_out", x, group, True, torch.empty(2 * size, 3)), np.split(total, size, 1)[rank])
    check(call("_low_contention_all_gather", x, group), np.concatenate(every))
    check(call("_low_contention_reduce_scatter", x, "avg", group), np.split(average, size)[rank])
    parts = np.concatenate([np.split(other, size)[rank] for other in every])
    check(call("nvshmem_all_to_all", x, out, group), parts)
    check(call("nvshmem_broadcast", x.clone(), size - 1, group), every[-1])
    tile = torch.full((2, 3), -1.0)
    call("tile_reduce", x[:2, 1:4], tile, 1, group)
    check(tile, total[:2, 1:4] if rank == 1 else np.full((2, 3), -1))
    tiles, roots = [x[i : i + 1, :3] for i in range(size)], [*reversed(range(size))]
    single = torch.zeros(1, 3)
    call("multi_root_tile_reduce", tiles, single, roots, group, "avg")
    check(single, average[roots.index(rank)][None, :3])

    right = [np.random.default_rng(9 + n).standard_normal((3 * size, 4), np.float32) for n in range(2)]
    Bs = [torch.from_numpy(B) for B in right]
    whole, products = call("fused_all_gather_matmul", x, Bs, 0, group)
    check(whole, np.concatenate(every))
    for product, B in zip(products, Bs, strict=True):
        assert torch.equal(product, torch.from_numpy(np.concatenate(every)) @ B)
    nothing, products = call("fused_all_gather_matmul", x[None], Bs, 1, group, return_A=False)
    assert nothing is None
    assert torch.equal(products[0], (torch.from_numpy(np.concatenate(every)) @ Bs[0])[None])
    wide = torch.cat([torch.from_numpy(B) for B in (right[0], *[right[1]] * (size - 1))])
    _, (product,) = call("fused_all_gather_matmul", x, [wide], 1, group)
    assert torch.equal(product, torch.from_numpy(np.concatenate(every, 1)) @ wide)
    each = [(torch.from_numpy(other) @ Bs[0]).numpy() for other in every]
    check(call("fused_matmul_reduce_scatter", x, Bs[0], "sum", 0, group), np.split(_total(*each), size)[rank])

    codes = [torch.from_numpy(_values(50 + r, 4 * size, 16)).to(torch.float8_e4m3fn) for r in range(size)]
    other = torch.from_numpy(_values(90, 16, 16)).to(torch.float8_e4m3fn).T
    one, rows = torch.tensor(0.5), [torch.from_numpy(np.abs(_values(60 + r, 4 * size, 1))) for r in range(size)]
    of_columns, dtype = torch.from_numpy(np.abs(_values(91, 1, 16))), torch.float32
    for scale, whole_scale, of_other in (
        (one, one, one),
        (rows[rank], torch.cat(rows), of_columns),
        (torch.cat(rows), torch.cat(rows), of_columns),
    ):
        given = [other], scale, [of_other], 0, group, [None], [None], [dtype], [False]
        whole, (product,) = call("fused_all_gather_scaled_matmul", codes[rank], *given)
        assert torch.equal(whole.view(torch.uint8), torch.cat(codes).view(torch.uint8))
        assert torch.equal(product, torch._scaled_mm(torch.cat(codes), other, whole_scale, of_other, out_dtype=dtype))
        if len(scale.shape) and scale.shape[0] != len(codes[rank]):
            continue
        mine = call(
            "fused_scaled_matmul_reduce_scatter", codes[rank].view(2, -1, 16), other, scale.view(-1, 4 * size // 2, 1)
            if scale.dim() else scale, of_other, "sum", 1, 1, group, [2, 2 * size, 16], out_dtype=dtype,
        )  # fmt: skip
        theirs = [
            torch._scaled_mm(codes[r], other, rows[r] if scale.dim() else one, of_other, out_dtype=dtype)
            for r in range(size)
        ]
        check(mine, np.split(_total(*(each.numpy().reshape(2, -1, 16) for each in theirs)), size, 1)[rank])

    words = torch.zeros(6, dtype=torch.int32)
    call("stream_write_value32_", words, 5, 7)
    assert call("memset32_", words.view(torch.uint32), 1, 2**32 - 1, 2).tolist() == [0, 2**32 - 1, 2**32 - 1, 0, 0, 7]
    for arguments, text in (((words, 4, 1, 3), "offset is 4 and count 3"), ((words.long(), 0, 1, 1), "input is torch")):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            operator("memset32_")(*arguments)
    assert called == {name for name in symm.OFFERED if "vdev" not in name}

    short = [other], rows[rank][1:], [one], 0, group, [None], [None], [None], [False]
    for name, arguments, text in (
        ("one_shot_all_reduce", (x, "max", group), "reduce_op is 'max', expected 'sum' or 'avg'"),
        ("one_shot_all_reduce_copy", (x[1:], x, "sum", group), "symm_buffer has"),
        ("_low_contention_reduce_scatter", (x[1:], "sum", group), "dimension 0 is"),
        ("multi_root_tile_reduce", (tiles, single, [0] * size, group), "roots is"),
        ("fused_all_gather_scaled_matmul", (codes[rank], *short), "A_scale has shape"),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            operator(name)(*arguments)


def _rounded(every: list[np.ndarray]) -> np.ndarray:
    """The sum of bfloat16 in float32, rounded once."""
    parts = [torch.from_numpy(other).bfloat16().float().numpy() for other in every]
    return torch.from_numpy(_total(*parts)).bfloat16().float().numpy()


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "alltoallv")])
def test_plain_operators(grouped: Grouped, size: int, backend: str) -> None:
    grouped(size, backend=backend)(plain)


def test_the_page_lists_all_operators() -> None:
    symm = importlib.import_module("alltoallv.torch.symm_mem")
    schemas = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("symm_mem::"):
            schemas[name.removeprefix("symm_mem::")] = torch._C._get_schema(name, "")
    listed = dict.fromkeys(symm.OFFERED, "offered") | dict.fromkeys(symm.UNREACHED, "torch's own")
    listed |= {name: f"refused: {why}" for name, why in symm.REFUSED.items()}
    assert listed.keys() == schemas.keys()
    rows = "".join(f"| `{name}` | {answer} |\n" for name, answer in sorted(listed.items()))
    table = f"| operator of torch {torch.__version__.rpartition('.')[0]} | here |\n|---|---|\n{rows}"
    before, _, _ = PAGE.read_text("utf-8").partition("| operator of torch")
    assert PAGE.read_text("utf-8") == before + table, f"expected {PAGE} to end with\n{table}"
    for name in symm.REFUSED:
        kinds = [str(each.type) for each in schemas[name].arguments if not each.has_default_value()]
        if any("SymmetricMemory" in kind for kind in kinds):
            continue  # Python cannot make one
        made = {"Tensor": torch.zeros(1), "List[Tensor]": [torch.zeros(1)], "str": "", "int": 0}
        with pytest.raises(NotImplementedError, match=f"symm_mem.{name} is refused: it"):
            operator(name)(*(made[kind] for kind in kinds))
