"""DDP's hook for quantized gradients: it learns, and error feedback stays with its parameters."""

# DDP asks for a hook's annotations as objects, hence no postponed ones.
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import alltoallv.torch as at
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Quantization


def train(group: Any, rank: int, hook: at.QuantizedCommHook | None, steps: int = 30) -> list[float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 20, generator=generator)
        loss = ((ddp(x) - x[:, :1] * x[:, 1:2]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(everyone, flat, group=group)
    assert all(torch.equal(one, flat) for one in everyone), "the ranks' models drift apart"
    return losses


@pytest.mark.parametrize("backend", ["alltoallv", "gloo"])
def test_ddp_hook(grouped: Grouped, backend: str) -> None:
    """The models stay equal on all ranks, and learn as with float32 gradients."""

    def check(rank: int, size: int, group: dist.ProcessGroup) -> None:
        plain = train(group, rank, None)
        for bits in (8, 4):
            hook = at.QuantizedCommHook(group, bits=bits, group_size=32)
            losses = train(group, rank, hook)
            assert abs(np.mean(losses[-5:]) - np.mean(plain[-5:])) < (0.02 if bits == 8 else 0.2)
        gc.collect()

    grouped(3, backend=backend)(check)
    with pytest.raises(InvalidParamError, match=r"bits is 7.*A2A-1197"):
        at.QuantizedCommHook(bits=7)


class Observed(at.QuantizedCommHook):
    """Remembers what DDP gives it: gradients by parameter, and the buckets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: dict[int, Tensor] = {}
        self.layouts: list[tuple[int, ...]] = []

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        parameters = bucket.parameters()
        self.layouts.append(tuple(map(id, parameters)))
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            self.given[id(parameter)] = gradient.detach().double()
        return super().__call__(state, bucket)


class Branches(torch.nn.Module):
    """Gradients are not ready in the order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        sizes = ((8, 30), (30, 17), (17, 30), (30, 5))
        self.late = torch.nn.ModuleList([torch.nn.Linear(*size) for size in sizes[::-1]])

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.late):
            x = torch.tanh(layer(x))
        return x


class Run:
    """Steps of one model with a hook, whose gradients stay so different that a misplaced error shows."""

    def __init__(self, group: Any, hook: Observed, **options: Any) -> None:
        self.group, self.hook, self.model = group, hook, Branches()
        self.ddp = DistributedDataParallel(self.model, process_group=group, **options)
        self.ddp.register_comm_hook(None, hook)

    def step(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """The rank's own gradients, and what DDP makes of them."""
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * number + self.group.rank()))
        self.ddp.zero_grad(set_to_none=True)
        self.ddp(x).pow(2).sum().backward()
        parameters = list(self.model.parameters())
        return [self.hook.given[id(p)] for p in parameters], [p.grad.clone().double() for p in parameters]  # type: ignore[union-attr]


def total(group: Any, tensors: list[Tensor]) -> Tensor:
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    return flat


def not_yet_given(group: Any, run: Run) -> Tensor:
    """What the averages so far lack, in the order of the parameters: the errors that the hook keeps."""
    saved, (rank, size) = run.hook.state_dict(), (group.rank(), group.size())
    parameters = list(run.model.parameters())
    places = {id(p): place for place, p in enumerate(parameters)}
    seen = dict.fromkeys(one for layout in run.hook.layouts for one in layout)  # by first appearance
    order = [places[one] for one in seen]
    pieces = [torch.zeros(p.numel(), dtype=torch.float64) for p in parameters]
    for bucket in saved["buckets"]:
        numels = [parameters[order[n]].numel() for n in bucket["parameters"]]
        error = bucket["error"].double() / size
        if bucket["gather_error"] is not None:
            begin, count = Quantization(group_size=32).part(sum(numels), size, rank)
            error[begin : begin + count] += bucket["gather_error"]
        for number, piece in zip(bucket["parameters"], error.split(numels), strict=True):
            pieces[order[number]] += piece
    return total(group, pieces)


@pytest.mark.parametrize("cap", [25, 0.002])
@pytest.mark.parametrize("gather", ["full", "quantized"])
@on_group(2)
def test_ddp_errors_follow_their_parameters(
    rank: int, size: int, group: dist.ProcessGroup, tmp_path: Path, gather: str, cap: float
) -> None:
    """Nothing is lost but what the state holds: the sum of all averages, and the state, is that of all gradients.

    So it is for every parameter, after DDP has put its buckets together anew, and after a restart half way.
    """
    how: dict[str, Any] = {"bits": 4, "group_size": 32, "gather": gather}
    run = Run(group, Observed(group, **how), bucket_cap_mb=cap)
    asked, got = torch.zeros(()), torch.zeros(())
    for number in range(8):
        if number == 4:
            assert len(set(run.hook.layouts)) > 1, "DDP did not make other buckets"
            assert (len(set(run.hook.layouts[-2:])) == 1) == (cap > 1)
            torch.save(run.hook.state_dict(), tmp_path / f"{rank}")
            run = Run(group, Observed(group, **how), bucket_cap_mb=cap)
            run.hook.load_state_dict(torch.load(tmp_path / f"{rank}"))
        given, made = run.step(number)
        asked, got = asked + total(group, given) / size, got + total(group, made) / size
        if number in (0, 3, 4, 5, 7):
            lacking = not_yet_given(group, run)
            assert lacking.abs().max() > 1e-3
            torch.testing.assert_close(got + lacking, asked, rtol=1e-5, atol=1e-5)


@on_group(2)
def test_ddp_resumes(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """With buckets that stay as they are, a training that was interrupted has the bits of one that was not."""
    options: dict[str, Any] = {"bucket_cap_mb": 0.002, "find_unused_parameters": True}
    hooks = [Observed(group, bits=4, group_size=32) for _ in range(2)]
    run = Run(group, hooks[0], **options)
    for number in range(3):
        run.step(number)
    assert len(set(run.hook.layouts)) > 1
    hooks[1].load_state_dict(run.hook.state_dict())
    other = Run(group, hooks[1], **options)
    for number in range(3, 6):
        for a, b in zip(run.step(number)[1], other.step(number)[1], strict=True):
            assert torch.equal(a, b)
    saved = hooks[0].state_dict()
    for wrong, message in (
        (None, "the state is a NoneType"),
        ({}, r"the state is \[\], expected a dict of shapes, group_size"),
        (saved | {"group_size": 64}, "the state has group_size 64, expected 32"),
        (saved | {"shapes": saved["shapes"][::-1]}, "for parameter 0 in the order of the first step"),
    ):
        with pytest.raises(InvalidParamError, match=message):
            hooks[1].load_state_dict(wrong)
    hook = Observed(group, bits=4, group_size=32)
    hook.load_state_dict(saved | {"rank": 1 - rank if rank else 0})  # one rank has another's
    error = InvalidParamError if rank else RuntimeError  # torch's, of its future
    with pytest.raises(error, match="is of rank 0 of 2, expected this rank's, 1 of 2"):
        Run(group, hook, **options).step(0)
