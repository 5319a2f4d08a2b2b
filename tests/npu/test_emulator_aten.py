"""Aten operators on emulated npu tensors: the CPU's bits, in the npu's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from npu_ranks import caught, emulated, use_device
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from alltoallv.testing import Ranks

Case = Callable[[Tensor, Tensor, Tensor], object]


def cases() -> dict[str, Case]:
    """Each gets floats of shape [6, 4], another of them, and indices 0..5 of shape [5]; differentiable ones first."""
    return {
        "arithmetic": lambda x, y, i: (x + y) * 2 - y / (x.abs() + 1),
        "matmul": lambda x, y, i: x @ y.t() + (x @ y[:4]).sum(),
        "bmm, einsum": lambda x, y, i: torch.einsum("ab,cb->ac", x, y) + torch.bmm(x[None], y.t()[None])[0],
        "softmax": lambda x, y, i: x.softmax(-1) + y.log_softmax(0),
        "norms": lambda x, y, i: F.layer_norm(x, (4,)) + F.normalize(y),
        "activations": lambda x, y, i: F.gelu(x) + F.relu(y) + F.silu(x) + torch.sigmoid(y) + F.softplus(x),
        "topk": lambda x, y, i: x.topk(2, -1)[0].sum() + y.sort(-1)[0][:, 0].sum(),
        "indexing": lambda x, y, i: x[i].sum() + y[1:5:2, ::2].sum() + x.gather(1, i[:4, None] % 4).sum(),
        "scatter": lambda x, y, i: y.index_add(0, i, x[:5]) + x.scatter_add(0, i[:, None].expand(5, 4), y[:5]),
        "embedding": lambda x, y, i: F.embedding(i, x) * 3,
        "cross entropy": lambda x, y, i: F.cross_entropy(x, i[[0, 1, 2, 3, 4, 0]] % 4),
        "losses": lambda x, y, i: F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.binary_cross_entropy_with_logits(x, y),
        "reductions": lambda x, y, i: x.mean(0) + y.sum(0) + x.var(0) + y.amax(0) + x.prod(0) + y.logsumexp(0),
        "shapes": lambda x, y, i: torch.cat([x.t().contiguous().view(6, 4), y.reshape(4, 6).t()]).flip(0).roll(1, 0),
        "where": lambda x, y, i: torch.where(x > y, x, y * 2).masked_fill(x > 1, 0.5),
        "cumulative": lambda x, y, i: x.cumsum(0) + y.tril() + F.pad(x, (1, 0))[:, :4],
        "convolution": lambda x, y, i: F.conv1d(x[None], y[None, :, :3].transpose(0, 1).repeat(1, 6, 1)),
        "attention": lambda x, y, i: F.scaled_dot_product_attention(x[None], y[None], x[None]),
        # Not differentiable.
        "casts": lambda x, y, i: (x.to(torch.float16), x.int(), x.bool(), i.float(), x.to(torch.bfloat16).double()),
        "conjugates": lambda x, y, i: [
            call(torch.complex(x, y).conj()) for call in (torch.square, torch.imag, torch.clone, torch.Tensor.tolist)
        ],
        "comparisons": lambda x, y, i: (x == y, x.isnan().any(), torch.equal(x, x), torch.allclose(x, y), x.argmax(1)),
        "sizes by value": lambda x, y, i: (x.nonzero(), i.unique(), x[x > 0], i.bincount(), i.repeat_interleave(2)),
        "factories": lambda x, y, i: (
            torch.arange(5, device=x.device), torch.eye(3, device=x.device), torch.full((2,), 7, device=x.device),
            torch.zeros_like(x), torch.ones(2, 2, device=x.device), torch.linspace(0, 1, 5, device=x.device),
            torch.tensor([1, 2], device=x.device), torch.zeros(0, 3, device=x.device).sum(),
        ),
        "in place": lambda x, y, i: (
            x.clone().add_(y).mul_(2).clamp_(-1, 1), y.clone().t().copy_(x.t()), y.clone().zero_(),
            x.clone().index_fill_(0, i, 2.0), y.clone().index_copy_(0, i[:2], x[:2]), x.clone().fill_diagonal_(9),
        ),
        "shapes in place": lambda x, y, i: (
            x.clone().t_(), y.clone().unsqueeze_(1), x[None].clone().squeeze_(0), y.clone().transpose_(0, 1),
        ),
        "out": lambda x, y, i: (
            torch.add(x, y, out=torch.empty(0, device=x.device)),
            torch.mm(x, y.t(), out=torch.empty(6, 6, device=x.device)),
            torch.sort(x, out=(torch.empty(0, device=x.device), torch.empty(0, dtype=torch.long, device=x.device))),
        ),
        "scalars for tensors": lambda x, y, i: (
            1 << i, 64 >> i, 6 & i, 8 | i, 5 ^ i, 7 % (i + 1), 2**x, torch.bitwise_left_shift(i, 2),
            torch.bitwise_right_shift(i, 1), torch.bitwise_or(i, 8), torch.xlogy(2, x.abs()), torch.copysign(x, -1.0),
            torch.special.zeta(2.0, x.abs() + 1), torch.special.xlog1py(2.0, y.abs()), torch.float_power(2, x),
            torch.where(x > 0, 1.0, x), torch.bitwise_left_shift(i, 1, out=torch.empty_like(i)),
        ),
        "lists": lambda x, y, i: (torch._foreach_add([x, y], 1.0), torch.stack([x, y]).unbind(), x.split(2)),
        "items": lambda x, y, i: (x.sum().item(), x.tolist(), bool((x == x).all()), x.numel(), len(x)),
    }  # fmt: skip


@on_ranks(1, communicator=False)
def test_qr_of_float16(rank: int, size: int) -> None:
    """Which NPUs have, and the CPU has not."""
    device, matrix = use_device(rank), inputs("cpu")[0].half()
    for mode in ("reduced", "complete", "r"):
        expected = [part.half() for part in torch.linalg.qr(matrix.float(), mode)]
        results = torch.linalg.qr(matrix.to(device), mode)
        outs = tuple(torch.empty(0, dtype=torch.float16, device=device) for _ in range(2))
        torch.linalg.qr(matrix.to(device), mode, out=outs)
        for result, out, part in zip(results, outs, expected, strict=True):
            assert torch.equal(result.cpu(), part)
            assert torch.equal(out.cpu(), part)


def inputs(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)
    return x.to(device), y.to(device), torch.tensor([5, 0, 3, 1, 2], device=device)


def flat(result: object) -> list[object]:
    if isinstance(result, (tuple, list)):
        return [one for part in result for one in flat(part)]
    return [result]


def same(result: object, expected: object) -> bool:
    if not isinstance(expected, Tensor):
        return result == expected
    assert isinstance(result, Tensor)
    assert result.device.type == "npu"
    back = result.cpu()
    both_nan = expected.isnan() & back.isnan()
    return back.dtype == expected.dtype and back.shape == expected.shape and bool(((back == expected) | both_nan).all())


@on_ranks(1, communicator=False)
def test_operators_give_the_bits_of_the_cpu(rank: int, size: int) -> None:
    device = use_device(rank)
    for name, case in cases().items():
        results, expected = flat(case(*inputs(device))), flat(case(*inputs("cpu")))
        assert len(results) == len(expected), name
        assert all(same(a, b) for a, b in zip(results, expected, strict=True)), name
        if len(expected) > 1 or not isinstance(expected[0], Tensor):
            continue
        gradients = []
        for where in (device, "cpu"):
            x, y, i = inputs(where)
            result = case(x.requires_grad_(), y.requires_grad_(), i)
            assert isinstance(result, Tensor)
            (result * result).sum().backward()
            gradients.append([t.grad for t in (x, y)])
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None), name
            assert b is None or same(a, b), f"gradients of {name}"


@on_ranks(1, communicator=False)
def test_integers_are_counted(rank: int, size: int) -> None:
    """The CPU has no such kernel; NPUs count exactly, and give the integers' dtype."""
    device = use_device(rank)
    numbers = [5, 0, 3, 3, 7, 8, -1, 2, 3, 7]
    for bins, low, high, expected in (
        (8, 0, 8, [1, 0, 1, 3, 0, 1, 0, 3]),  # the last bin has its upper end
        (4, 0, 8, [1, 4, 1, 3]),
        (3, 0, 0, [2, 4, 4]),  # from the least to the largest
        (5, 20, 30, [0] * 5),
    ):
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
            counts = torch.histc(torch.tensor(numbers, dtype=dtype, device=device), bins=bins, min=low, max=high)
            assert counts.dtype == dtype
            assert counts.tolist() == expected
    routed = torch.tensor([[2, 0], [1, 2]], device=device)  # tokens by experts, as dispatchers count them
    out = torch.empty(0, dtype=torch.int64, device=device)
    assert torch.histc(routed, 3, 0, 2, out=out).tolist() == out.tolist() == [1, 1, 2]
    assert torch.histc(torch.full((2, 2), 4, device=device), 3).tolist() == [0, 4, 0]
    assert torch.histc(routed[:0], 3, 0, 2).tolist() == [0, 0, 0]
    x = torch.tensor([0.1, 0.9, 0.5])
    assert torch.equal(torch.histc(x.to(device), 4, 0, 1).cpu(), torch.histc(x, 4, 0, 1))


def test_models_train_as_on_the_cpu(ranks: Ranks) -> None:
    def train(device: torch.device | str) -> list[object]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(10, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5)
        ).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        tokens, classes = torch.randint(0, 10, (32,)), torch.randint(0, 5, (32,))
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens.to(device)), classes.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    def check(rank: int, size: int) -> None:
        device = use_device(rank)
        for delay in (0, 2000):  # compute waits for what is under way in the stream
            with emulated(task_delay_us=delay):
                assert all(same(a, b) for a, b in zip(train(device), train("cpu"), strict=True))

    ranks(1, communicator=False)(check)


@on_ranks(1, communicator=False)
def test_tensors_of_several_devices_do_not_mix(rank: int, size: int) -> None:
    """But for the host's scalars, and its indices."""
    import torch_npu

    device = use_device(rank)
    host = torch.ones(4, 4)
    x, other, rows = host.to(device), host.to("npu:1"), torch.tensor([0, 1])
    for call, places in (
        (lambda: x + host, "aten::add: expected all tensors to be on the same device, but found cpu, npu:0"),
        (lambda: nn.Linear(4, 4)(x), "aten::addmm"),
        (lambda: host.add_(x), "aten::add_"),
        (lambda: torch.add(x, x, out=torch.empty(4, 4)), "aten::add"),
        (lambda: torch.cat([x, host]), "aten::cat"),
        (lambda: x @ other, "found npu:0, npu:1"),
        (lambda: torch_npu.npu_rms_norm(x, torch.ones(4)), "npu::npu_rms_norm"),
    ):
        error = caught(call)
        assert isinstance(error, RuntimeError), error
        assert places in str(error)
    assert host.sum().item() == 16
    for right in (x[rows], x[host.bool()], x * torch.tensor(2.0), x.index_put((rows,), x[rows])):
        assert right.device == device


@on_ranks(1, communicator=False)
def test_random_numbers_follow_their_seed(rank: int, size: int) -> None:
    device = use_device(rank)
    torch.manual_seed(1)
    drawn = torch.rand(3, device=device)
    torch.manual_seed(1)
    assert torch.equal(drawn.cpu(), torch.rand(3))
    generator = torch.Generator(device=device)
    rows = []
    for seed in (5, None, 5, 6):
        if seed is not None:
            generator.manual_seed(seed)
        rows.append(torch.randn(3, device=device, generator=generator))
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[3])


@on_ranks(1, communicator=False)
def test_devices_and_their_memory(rank: int, size: int) -> None:
    device = use_device(rank)
    x = torch.ones(3, device="npu:1")
    assert x.device.index == 1
    assert (x.to(device) + torch.ones(3, device=device)).tolist() == [2.0] * 3
    assert "out of memory" in str(caught(lambda: torch.empty(10**11, device=device)))
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    side = torch.npu.Stream()
    with emulated(task_delay_us=20000):
        with torch.npu.stream(side):
            y = torch.empty(4, device=device).copy_(pinned, non_blocking=True)
        torch.npu.current_stream().wait_stream(side)
        assert (y + 1).tolist() == [1.0, 2.0, 3.0, 4.0]
