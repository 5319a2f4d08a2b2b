"""Random programs of mixed collectives, over shared memory and over torch's gloo in the same processes.

What gloo does not know (some dtypes and operators) is compared with `alltoallv.testing.reference`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, operators
from torch import Tensor

from alltoallv.testing import reference

PROGRAMS = 100  # per world size
STEPS = 10
GLOO = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
OTHERS = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64]
OPS = {op.name.lower(): op for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)}
OPS["prod"] = dist.ReduceOp.PRODUCT
KINDS = ["all_reduce", "reduce_scatter", "reduce_scatter_single", "all_gather", "all_gather_single", "broadcast"]
KINDS += ["all_to_all", "all_to_all_even", "all_to_all_single", "all_to_all_single_even", "barrier"]
MEMBERS = {2: [[0, 1], [1]], 3: [[0, 1, 2], [0, 2], [1, 2]], 4: [[0, 1, 2, 3], [0, 1, 3], [3, 2], [0, 2]]}


@dataclass
class Group:
    """Some ranks as a group over shared memory and one over gloo."""

    members: list[int]
    ours: Any
    gloo: Any


@dataclass
class Step:
    """Drawn alike on every rank; every rank can make the data of all."""

    kind: str
    dtype: torch.dtype
    op: str
    counts: list[list[int]]  # [sender][receiver]
    root: int
    columns: int
    seed: int
    strided: bool

    def tensor(self, rank: int, *shape: int) -> Tensor:
        """Small integers, so that no order of additions and no rounding shows."""
        values = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(self.seed * 16 + rank))
        return values.to(self.dtype)

    def space(self, *shape: int) -> Tensor:
        """An output with recognizable values; strided: every other column of a larger tensor."""
        if self.strided and len(shape) > 0:
            return torch.full((*shape[:-1], 2 * shape[-1]), 1).to(self.dtype)[..., ::2]
        return torch.full(shape, 1).to(self.dtype)


def draw(rng: random.Random, size: int) -> Step:
    kind = rng.choice(KINDS)
    reduces = "reduce" in kind
    dtypes = GLOO + OTHERS[:2] if reduces else GLOO + OTHERS
    dtype = rng.choice(dtypes)
    op = rng.choice(list(OPS) if dtype.is_floating_point else [name for name in OPS if name != "avg"])
    largest = rng.choice([3, 40, 3000])  # inline, and beyond
    even = rng.randint(0, largest)
    counts = [[even if "even" in kind else rng.choice([0, 1, rng.randint(0, largest)]) for _ in range(size)]
              for _ in range(size)]  # fmt: skip
    return Step(kind, dtype, op, counts, rng.randrange(size), rng.choice([1, 2, 5]), rng.randrange(1 << 40),
                rng.random() < 0.3)  # fmt: skip


def call(step: Step, group: Any, members: list[int], async_op: bool, strided: bool) -> tuple[list[Tensor], Any]:
    """Runs one step; returns the outputs, which are complete once the work, if any, has been waited for."""
    size, r = len(members), members.index(dist.get_rank())
    step = replace(step, strided=step.strided and strided)
    op, n, c = OPS[step.op], step.counts[0][0], step.columns
    keywords = {"group": group, "async_op": async_op}
    if step.kind == "barrier":
        return [], dist.barrier(**keywords)
    if step.kind in ("all_reduce", "broadcast"):
        out = step.space(n, c).copy_(step.tensor(r, n, c))
        if step.kind == "all_reduce":
            return [out], dist.all_reduce(out, op, **keywords)
        return [out], dist.broadcast(out, src=members[step.root], **keywords)
    if step.kind.startswith("reduce_scatter"):
        whole, out = step.tensor(r, size * n, c), step.space(n, c)
        if step.kind == "reduce_scatter_single":
            return [out], dist.reduce_scatter_single(out, whole, op, **keywords)
        return [out], dist.reduce_scatter(out, list(whole.chunk(size) if n else [whole] * size), op, **keywords)
    if step.kind == "all_gather":
        outs = [step.space(n, c) for _ in range(size)]
        return outs, dist.all_gather(outs, step.tensor(r, n, c), **keywords)
    if step.kind == "all_gather_single":
        out = step.space(size * n, c)
        return [out], dist.all_gather_single(out, step.tensor(r, n, c), **keywords)
    sends, recvs = step.counts[r], [row[r] for row in step.counts]
    x = step.tensor(r, sum(sends), c)
    if step.kind in ("all_to_all", "all_to_all_even"):
        outs = [step.space(n, c) for n in recvs]
        return outs, dist.all_to_all(outs, list(x.split(sends)), **keywords)
    out = step.space(sum(recvs), c)
    splits = (None, None) if step.kind == "all_to_all_single_even" else (recvs, sends)
    return [out], dist.all_to_all_single(out, x, *splits, **keywords)


def expected(step: Step, r: int, size: int) -> list[Tensor]:
    """Returns the result by its definition, from the data of all ranks."""
    n, c = step.counts[0][0], step.columns

    def arrays(*shape: int) -> list[Any]:
        return [_array(step.tensor(j, *shape)) for j in range(size)]

    if step.kind == "barrier":
        return []
    if step.kind == "all_reduce":
        results = [reference.all_reduce(arrays(n, c), step.op)[r]]
    elif step.kind == "broadcast":
        results = [reference.broadcast(arrays(n, c), step.root)[r]]
    elif step.kind.startswith("reduce_scatter"):
        results = [reference.reduce_scatter(arrays(size * n, c), step.op)[r]]
    elif step.kind == "all_gather":
        results = reference.all_gather(arrays(n, c))[r]
    elif step.kind == "all_gather_single":
        results = [reference.all_gather_into_tensor(arrays(n, c))[r]]
    else:
        inputs = [_array(step.tensor(j, sum(step.counts[j]), c)) for j in range(size)]
        lists = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(inputs, step.counts, strict=True)]
        results = reference.all_to_all(lists)[r]
        if "single" in step.kind:
            results = [np.concatenate(results)]
    return [torch.from_numpy(result).view(step.dtype) for result in results]


def _array(tensor: Tensor) -> Any:
    """As NumPy; what it does not know as bytes of the same size, which movement does not notice."""
    stand_ins = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}
    return tensor.view(stand_ins.get(tensor.dtype, tensor.dtype)).numpy()


def gloo_knows(step: Step) -> bool:
    """Not some dtypes, and no lists of tensors of different sizes."""
    return step.kind == "barrier" or (step.dtype in GLOO and step.kind != "all_to_all")


def program(number: int, groups: list[Group]) -> Counter[str]:
    """Runs the steps on both; asynchronous ones are waited for at random later points, in any order."""
    rng = random.Random(number)
    rank, compared = dist.get_rank(), Counter[str]()
    own = random.Random(number * 16 + rank)  # when to wait is each rank's own affair
    pending: list[tuple[Step, list[Tensor], Any, list[Tensor]]] = []

    def finish(index: int) -> None:
        step, outs, work, truth = pending.pop(index)
        if work is not None:
            assert work.wait()
        for j, (out, want) in enumerate(zip(outs, truth, strict=True)):
            about = f"program {number}, {step}, output {j}"
            close = {"rtol": 1e-2, "atol": 1e-2} if step.dtype.itemsize == 2 else {"rtol": 1e-6, "atol": 1e-7}
            close = close if step.op == "avg" and "reduce" in step.kind else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(out, want, **close, msg=lambda text, about=about: f"{about}: {text}")

    for _ in range(STEPS):
        group = rng.choice(groups)
        step, async_op = draw(rng, len(group.members)), rng.random() < 0.5
        if rank not in group.members:
            continue
        outs, work = call(step, group.ours, group.members, async_op, True)
        assert (work is not None) == async_op
        if gloo_knows(step):
            truth, waiting = call(step, group.gloo, group.members, True, False)
            waiting.wait()
            compared["gloo"] += 1
        else:
            truth = expected(step, group.members.index(rank), len(group.members))
            compared["reference"] += 1
        pending.append((step, outs, work, truth))
        while pending and own.random() < 0.4:
            finish(own.randrange(len(pending)))
    while pending:
        finish(0)
    return compared


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_same_results_as_gloo(grouped: Grouped, size: int) -> None:
    def run(rank: int, size: int, world: dist.ProcessGroup) -> dict[str, int]:
        groups = [Group(m, dist.new_group(m, sort_ranks=False), dist.new_group(m, backend="gloo", sort_ranks=False))
                  for m in MEMBERS[size]]  # fmt: skip
        total = sum((program(1000 * size + number, groups) for number in range(PROGRAMS)), Counter[str]())
        ran = sum(operators(group.ours) for group in groups if rank in group.members)
        assert ran == total.total(), (ran, total)
        assert operators(world) == 0
        return dict(total)

    found = grouped(size, seconds=120)(run)
    print(f"{PROGRAMS} programs on {size} ranks, steps compared on each rank: {found}")
    assert all(counts["gloo"] > PROGRAMS and counts["reference"] > PROGRAMS / 2 for counts in found)
