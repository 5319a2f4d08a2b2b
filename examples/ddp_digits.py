"""Train a small network on handwritten digits with DistributedDataParallel and average its gradients as codes.

The digits are split over the ranks. In every step DDP averages the gradients: in float32, or through
`QuantizedCommHook` with 8 or 4 bits, where an error feedback adds to each gradient the rounding error of the one
before. For comparison, one training uses 4 bits without error feedback. Every training uses the same seeds, which
choose the first weights and the order of the digits; the spread of the float32 losses over the seeds is the noise level
for the others.

    pip install torch scikit-learn matplotlib
    python examples/ddp_digits.py --np 4 --plot losses.png
    torchrun --nproc-per-node 4 examples/ddp_digits.py --backend gloo
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from sklearn import datasets
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/ddp_digits.py needs {error.name}: pip install torch scikit-learn") from None

import alltoallv.torch as at
from alltoallv.launch import detect as launch

WIDTH, HIDDEN, CLASSES, TRAIN = 64, 128, 10, 1408  # 11 batches of 128; the other 389 digits are the test
WAYS: dict[str, dict[str, Any]] = {  # the gradients' format, and the arguments of the hook
    "float32": {},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int4-no-feedback": {"bits": 4, "error_feedback": False},
}


def load_digits() -> tuple[Tensor, Tensor]:
    """Returns pixels, 0 to 1, [1797, 64], and classes 0 to 9, [1797]; shuffled, the same on all ranks."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(classes)[order]


def train(hook: dict[str, Any], seed: int, options: argparse.Namespace) -> tuple[list[float], float]:
    """Returns the loss over all training digits after every epoch, and the final share of test digits recognized."""
    torch.manual_seed(seed)  # on all ranks: the first weights, then the order
    layers = (nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    net = nn.Sequential(*layers)
    model = DistributedDataParallel(net)
    if hook:
        model.register_comm_hook(None, at.QuantizedCommHook(group_size=options.group_size, **hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    pixels, classes = load_digits()
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for _ in range(options.epochs):
        for batch in torch.randperm(TRAIN).split(options.batch):
            mine = batch.tensor_split(size)[rank]
            # DDP divides the sum of the ranks' gradients by their number.
            loss = F.cross_entropy(model(pixels[mine]), classes[mine], reduction="sum") * size / len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(F.cross_entropy(net(pixels[:TRAIN]), classes[:TRAIN]).item())
    check_same_weights(net)
    with torch.no_grad():
        hits = net(pixels[TRAIN:]).argmax(-1) == classes[TRAIN:]
    return losses, hits.double().mean().item()


def check_same_weights(net: nn.Module) -> None:
    """Checks that all ranks have the same weights to the bit: an average from codes is one result, not one per rank."""
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        raise SystemExit("the weights of the ranks differ")


def draw(losses: dict[str, Tensor], size: int, path: Path) -> None:
    """Draws the losses over the epochs, and the distance of the quantized ones from float32."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    curve, apart = figure.subplots(1, 2)
    reference = losses["float32"]
    epochs = range(1, reference.shape[1] + 1)
    for (way, values), style in zip(losses.items(), ("-", "--", ":", "-."), strict=True):
        (line,) = curve.plot(epochs, values.mean(0), style, label=way)
        if way != "float32":
            difference = ((values - reference).abs() / reference).mean(0)
            apart.plot(epochs, 100 * difference, style, color=line.get_color(), label=f"{way}, same seed")
    curve.fill_between(epochs, reference.amin(0), reference.amax(0), color="C0", alpha=0.15, linewidth=0)
    apart.plot(epochs, 100 * reference.std(0) / reference.mean(0), color="C0", label="float32, from seed to seed")
    curve.set_ylabel("cross entropy over the training digits")
    curve.set_title(f"mean of {len(reference)} seeds; band: float32, all seeds", fontsize=10)
    apart.set_ylabel("difference from float32, % of the loss")
    apart.set_title("mean difference, and noise (standard deviation)", fontsize=10)
    for axes in (curve, apart):
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"Digits, DistributedDataParallel on {size} ranks, gradients averaged as codes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def run(options: argparse.Namespace) -> None:
    """Trains in every format with every seed; rank 0 prints and draws."""
    dist.init_process_group(options.backend)
    first, size = dist.get_rank() == 0, dist.get_world_size()
    if first:
        print(f"{size} ranks, backend {options.backend}, {options.epochs} epochs, seeds 0 to {options.seeds - 1}")
        print("noise: standard deviation of float32's loss from seed to seed; apart: from float32, of the same seed")
        print(f"{'gradients':16}  mean loss  off in noises  largest apart  recognized", flush=True)
    losses: dict[str, Tensor] = {}
    for way, hook in WAYS.items():
        runs = [train(hook, seed, options) for seed in range(options.seeds)]
        losses[way] = torch.tensor([curve for curve, _ in runs], dtype=torch.float64)
        last, reference = losses[way][:, -1], losses["float32"][:, -1]
        off = (last.mean() - reference.mean()) / reference.std()
        apart = (last - reference).abs().max()
        recognized = sum(share for _, share in runs) / len(runs)
        if first:
            print(f"{way:16}  {last.mean():9.6f}  {off:13.3f}  {apart:13.6f}  {recognized:10.2%}", flush=True)
    if first:
        print(f"the noise is {losses['float32'][:, -1].std():.6f}")
        if options.plot:
            draw(losses, size, options.plot)
            print(f"as a picture: {options.plot}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=4, help="ranks to start, where no launcher has (default: 4)")
    parser.add_argument("--backend", default="alltoallv", choices=["alltoallv", "gloo"], help="of torch.distributed")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, at least 2")
    parser.add_argument("--batch", type=int, default=128, help="digits per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--group-size", type=int, default=128, help="elements per scale")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes a picture of the losses")
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}, expected at least 2: their spread is the noise")
    if launch.detect().launcher == "single":  # not under a launcher: start the ranks
        command = [sys.executable, "-m", "alltoallv", "run", "--no-prefix", "-n", str(options.np), *sys.argv]
        return subprocess.run(command, check=False).returncode
    torch.set_num_threads(1)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
