"""Trains a small transformer with routed experts, in torch_npu's fused operators as programs for Ascend NPUs use them.

It learns English letters, with attention with rotary positions, RMS norms, and SwiGLU experts; every token goes to 2 of
8 experts. Four NPUs share the batch and the experts. Training exchanges tokens inside the experts' matrix products
(npu_alltoallv_gmm and npu_gmm_alltoallv, each the other's gradient, as in MindSpeed); the losses equal the ones of the
same model in plain torch in one process. Then the trained model predicts letters and dispatches its tokens in three
ways that serving uses (MC2's operators, all_to_all_v, all-gather), which give the same letters.

    pip install torch_npu==2.13.*
    python -m alltoallv run --emulate-npu -n 4 examples/npu_moe_transformer.py --device npu

Without torch_npu the same program runs on CPU tensors, `alltoallv.npu_ops` in torch_npu's place:

    pip install torch
    python -m alltoallv run -n 4 examples/npu_moe_transformer.py
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn import functional as F
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/npu_moe_transformer.py needs {error.name}: pip install torch") from None

import alltoallv.torch as at

EXPERTS, TOP_K, WIDTH, HEADS, INNER, BLOCKS = 8, 2, 32, 2, 32, 2
LETTERS, BATCH, LENGTH = 128, 8, 32  # BATCH: sequences on all ranks together
TOLERANCE = 2e-5
ops: Any = None  # torch_npu, or alltoallv.npu_ops


class Ranks:
    """The ranks that share the experts, and the name of their group for operators that communicate."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        self.name = self.group.group_name
        if device.type == "npu":
            self.name = self.group._get_backend(device).get_hccl_comm_name(self.rank)
        self.local = EXPERTS // self.size
        self.mine = slice(self.rank * self.local, (self.rank + 1) * self.local)

    def arriving(self, per_expert: Tensor) -> Tensor:
        """Returns the counts of rows that arrive for this rank's experts, by rank and expert."""
        told = torch.empty_like(per_expert)
        dist.all_to_all_single(told, per_expert, group=self.group)
        return told


class Scattered(torch.autograd.Function):
    """Sends rows to experts and multiplies by their first weights: npu_alltoallv_gmm; gradient: npu_gmm_alltoallv."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ranks: Ranks, sends: list[int], recvs: list[int]) -> Tensor:
        given = ranks.name, ranks.size, sends, recvs
        y, _, arrived = ops.npu_alltoallv_gmm(rows, weight, *given, permute_out_flag=True)
        ctx.save_for_backward(arrived, weight)
        ctx.ranks, ctx.sends, ctx.recvs = ranks, sends, recvs
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arrived, weight = ctx.saved_tensors
        given = ctx.ranks.name, ctx.ranks.size, ctx.recvs, ctx.sends
        of_rows, _ = ops.npu_gmm_alltoallv(grad, weight, *given, trans_gmm_weight=True)
        return of_rows, of_weights(arrived, grad, ctx.recvs, ctx.ranks), None, None, None


class Gathered(torch.autograd.Function):
    """Multiplies rows by experts' second weights and returns them: npu_gmm_alltoallv; gradient: npu_alltoallv_gmm."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ranks: Ranks, sends: list[int], recvs: list[int]) -> Tensor:
        y, _ = ops.npu_gmm_alltoallv(rows, weight, ranks.name, ranks.size, sends, recvs)
        ctx.save_for_backward(rows, weight)
        ctx.ranks, ctx.sends, ctx.recvs = ranks, sends, recvs
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        given = ctx.ranks.name, ctx.ranks.size, ctx.recvs, ctx.sends
        of_rows, _, arrived = ops.npu_alltoallv_gmm(grad, weight, *given, trans_gmm_weight=True, permute_out_flag=True)
        return of_rows, of_weights(rows, arrived, ctx.sends, ctx.ranks), None, None, None


def of_weights(rows: Tensor, grad: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
    """Returns the gradient of each expert's weights, from its input and its output's gradient."""
    sizes = torch.tensor(counts, device=rows.device).view(ranks.size, -1).sum(0)
    given = {"group_list": sizes, "group_list_type": 1, "split_item": 3, "group_type": 2}
    return ops.npu_grouped_matmul([rows.t()], [grad], **given)[0]


class Experts(nn.Module):
    """Two matrices per expert; a rank uses its own experts' matrices."""

    def __init__(self, ranks: Ranks | None) -> None:
        super().__init__()
        own = slice(None) if ranks is None else ranks.mine
        self.ranks = ranks
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS) * 0.3)
        self.up = nn.Parameter((torch.randn(EXPERTS, WIDTH, 2 * INNER) * WIDTH**-0.5)[own].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)[own].clone())

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = (x @ self.router).softmax(-1).topk(TOP_K)
        return weights / weights.sum(-1, keepdim=True), chosen.int()

    def forward(self, x: Tensor, way: str) -> Tensor:
        if self.ranks is None:
            return self.plainly(x)
        return {"train": self.trained, "mc2": self.mc2, "all_to_all_v": self.exchanged, "all-gather": self.gathered}[
            way
        ](x)

    def plainly(self, x: Tensor) -> Tensor:
        """Computes in plain torch: every expert on its tokens, one after another."""
        weights, chosen = self.routed(x)
        result = torch.zeros_like(x)
        for number in range(EXPERTS):
            tokens, choices = (chosen == number).nonzero(as_tuple=True)
            a, b = (x[tokens] @ self.up[number]).chunk(2, -1)
            made = (F.silu(a) * b) @ self.down[number]
            result = result.index_add(0, tokens, made * weights[tokens, choices].unsqueeze(-1))
        return result

    def trained(self, x: Tensor) -> Tensor:
        """Computes as MindSpeed trains: permute, exchange within the products, unpermute."""
        weights, chosen = self.routed(x)
        rows, places = ops.npu_moe_token_permute(x, chosen)
        per_expert = torch.bincount(chosen.view(-1), minlength=EXPERTS)
        sends, recvs = per_expert.tolist(), self.ranks.arriving(per_expert).tolist()
        inner = ops.npu_swiglu(Scattered.apply(rows, self.up, self.ranks, sends, recvs))
        back = Gathered.apply(inner, self.down, self.ranks, recvs, sends)
        return ops.npu_moe_token_unpermute(back, places, weights)

    def computed(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Applies this rank's experts to rows that are sorted by expert."""
        given = {"group_list": sizes, "group_list_type": 1, "split_item": 2, "group_type": 0}
        inner = ops.npu_swiglu(ops.npu_grouped_matmul([rows], [self.up], **given)[0])
        return ops.npu_grouped_matmul([inner], [self.down], **given)[0]

    def mc2(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        ranks = self.ranks
        place = ranks.name, ranks.size, ranks.rank, EXPERTS
        rows, _, assist, sizes, counts, *_ = ops.npu_moe_distribute_dispatch_v2(x, chosen, *place)
        made = self.computed(rows, sizes)
        return ops.npu_moe_distribute_combine_v2(made, chosen, assist, counts, weights.float(), *place)

    def exchanged(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        ranks = self.ranks
        given = {"expert_num": EXPERTS, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
        given |= {"active_num": chosen.numel(), "quant_mode": -1, "active_expert_range": [0, EXPERTS]}
        rows, places, per_expert, _ = ops.npu_moe_init_routing_v2(x, chosen, **given)
        told = ranks.arriving(per_expert).view(ranks.size, -1)
        sends, recvs = per_expert.view(ranks.size, -1).sum(1).tolist(), told.sum(1).tolist()
        arrived = at.all_to_all_v(rows, sends, recvs, unit="row", group=ranks.group)
        rows, _, order, sizes = ops.npu_moe_re_routing(arrived, told)
        made = torch.empty_like(arrived).index_copy(0, order.long(), self.computed(rows, sizes))
        back = at.all_to_all_v(made, recvs, sends, unit="row", group=ranks.group)
        return ops.npu_moe_token_unpermute(back, places, weights)

    def gathered(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        ranks = self.ranks
        every = [x.new_empty(ranks.size, *one.shape, dtype=one.dtype) for one in (x, weights, chosen)]
        for whole, one in zip(every, (x, weights, chosen), strict=True):
            dist.all_gather_into_tensor(whole, one.contiguous(), group=ranks.group)
        all_x, all_weights, all_chosen = (whole.flatten(0, 1) for whole in every)
        given = {"expert_num": EXPERTS, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
        given |= {"active_num": all_chosen.numel(), "quant_mode": -1}
        bounds = [ranks.mine.start, ranks.mine.stop]
        rows, places, sizes, _ = ops.npu_moe_init_routing_v2(all_x, all_chosen, active_expert_range=bounds, **given)
        here = (all_chosen >= bounds[0]) & (all_chosen < bounds[1])
        made = self.computed(rows, sizes)  # choices that are not here have place -1 and weight 0
        parts = ops.npu_moe_token_unpermute(made, places.abs(), all_weights * here)
        result = torch.empty_like(x)
        dist.reduce_scatter_tensor(result, parts, group=ranks.group)
        return result


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cosines and sines of rotary positions, and what each position must not see."""
    size = WIDTH // HEADS
    angle = torch.arange(LENGTH).outer(10000.0 ** (-torch.arange(0, size, 2) / size))
    angle = torch.cat([angle, angle], -1).view(1, LENGTH, 1, size)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return angle.cos().to(device), angle.sin().to(device), hidden.to(device)


class Block(nn.Module):
    def __init__(self, ranks: Ranks | None) -> None:
        super().__init__()
        self.plain = ranks is None
        self.norms = nn.Parameter(torch.ones(2, WIDTH))
        self.qkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * WIDTH**-0.5)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.experts = Experts(ranks)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), gamma, 1e-6) if self.plain else ops.npu_rms_norm(x, gamma, 1e-6)[0]

    def turn(self, x: Tensor) -> Tensor:
        """Applies rotary positions to [batch, length, heads, size]."""
        cos, sin, _ = tables(x.device)
        if not self.plain:
            return ops.npu_rotary_mul(x, cos, sin)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.qkv).view(-1, LENGTH, 3, HEADS, WIDTH // HEADS).unbind(2)
        q, k, scale = self.turn(q), self.turn(k), (WIDTH // HEADS) ** -0.5
        if self.plain:
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            mask = tables(x.device)[2]
            y = ops.npu_fusion_attention(q, k, v.contiguous(), HEADS, "BSND", atten_mask=mask, scale=scale)[0]
        return y.reshape(x.shape) @ self.out

    def forward(self, x: Tensor, way: str) -> Tensor:
        x = x + self.attend(self.norm(x, self.norms[0]))
        rows = self.norm(x, self.norms[1]).view(-1, WIDTH)
        return x + self.experts(rows, way).view(x.shape)


class Model(nn.Module):
    """The model: with ranks in torch_npu's operators, without in plain torch; the initial weights are equal."""

    def __init__(self, ranks: Ranks | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Parameter(torch.randn(LETTERS, WIDTH))
        self.blocks = nn.ModuleList(Block(ranks) for _ in range(BLOCKS))
        self.head = nn.Parameter(torch.randn(WIDTH, LETTERS) * WIDTH**-0.5)

    def forward(self, letters: Tensor, way: str = "train") -> Tensor:
        x = self.letters[letters]
        for block in self.blocks:
            x = block(x, way)
        return x @ self.head


def batches(steps: int) -> list[Tensor]:
    """Returns BATCH sequences of LENGTH + 1 letters for every step."""
    text = Path(__file__).with_name("sentences.txt").read_bytes()
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % LETTERS
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(letters) - LENGTH - 1, (steps, BATCH), generator=generator)
    return list(letters[starts.unsqueeze(-1) + torch.arange(LENGTH + 1)])


def train(model: Model, ranks: Ranks | None, steps: int, device: torch.device) -> list[float]:
    """Returns the loss of every step, over the sequences of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    shared = [one for name, one in model.named_parameters() if not name.endswith(("up", "down"))]
    losses = []
    for batch in batches(steps):
        mine = (batch if ranks is None else batch.chunk(ranks.size)[ranks.rank]).to(device)
        logits = model(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum") / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().view(1)
        if ranks is not None:
            flat = torch.cat([total, *(one.grad.view(-1) for one in shared)])
            dist.all_reduce(flat)
            total, *grads = flat.split([1, *(one.numel() for one in shared)])
            for one, grad in zip(shared, grads, strict=True):
                one.grad = grad.view_as(one)
        optimizer.step()
        losses.append(total.item())
    return losses


def measure(model: Model, ranks: Ranks, device: torch.device, turns: int) -> None:
    """Prints the times of a step here and in plain torch, in turns; in plain torch ranks compute all sequences."""
    took: list[tuple[float, float]] = []
    plain = Model(None)
    for _ in range(turns + 1):
        marks = []
        for one in ((model, ranks, 3, device), (plain, None, 9, torch.device("cpu"))):
            dist.barrier()
            start = time.perf_counter()
            train(one[0], *one[1:])
            marks.append((time.perf_counter() - start) / one[2] * 1e3)
        took.append((marks[0], marks[1]))
    if ranks.rank == 0:
        ours, theirs = (statistics.median(times) for times in zip(*took[1:], strict=True))
        ratio = statistics.median(a / b for a, b in took[1:])
        print(f"a step takes {ours:.0f} ms, in plain torch {theirs:.0f} ms: {ratio:.1f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--measure", type=int, default=0, metavar="TURNS", help="time steps, and plain torch's")
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"], help="where every rank computes")
    options = parser.parse_args()
    if options.device == "npu" and find_spec("torch_npu") is None:
        parser.error("--device npu needs torch_npu: pip install 'torch_npu==2.13.*'")
    os.environ.setdefault("ALLTOALLV_NPU_LIMITS", "relax")  # the model is smaller than the devices allow
    torch.set_num_threads(1)
    global ops
    device = torch.device("cpu")
    if options.device == "npu":
        import torch_npu as ops

        device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
        torch.npu.set_device(device)
    else:
        import alltoallv.npu_ops as ops
    dist.init_process_group("hccl" if options.device == "npu" else "alltoallv")
    ranks = Ranks(device)
    model = Model(ranks).to(device)
    losses = train(model, ranks, options.steps, device)
    with torch.no_grad():
        sequences = batches(1)[0].chunk(ranks.size)[ranks.rank][:, :-1].to(device)
        guesses = {way: model(sequences, way).argmax(-1).cpu() for way in ("mc2", "all_to_all_v", "all-gather")}
    for way, letters in guesses.items():
        if not torch.equal(letters, guesses["mc2"]):
            raise SystemExit(f"rank {ranks.rank}: tokens dispatched by {way} give other letters than by mc2")
    dist.barrier()
    if ranks.rank == 0:
        expected = train(Model(None), None, options.steps, torch.device("cpu"))
        for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True), 1):
            print(f"step {step:2d}: loss {ours:.6f}, in plain torch {theirs:.6f}")
        apart = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
        if not apart <= TOLERANCE:
            raise SystemExit(f"the losses differ by {apart:.1e}, allowed are {TOLERANCE:.0e}")
        print(f"same losses to {apart:.1e}; the same letters by mc2, all_to_all_v and all-gather")
    if options.measure:
        measure(model, ranks, device, options.measure)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
