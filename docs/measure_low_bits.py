"""What formats of 8 and fewer bits lose for their bytes, as a table and a plot of docs/quantization.md.

    python examples/tensor_parallel_minilm.py --np 4 --formats int8 int4 --save minilm.json
    python docs/measure_low_bits.py --minilm minilm.json --plot docs/low_bits.png

The table has a row for every format and group size in the file. Its errors are `measure_formats`' errors: relative L2
of a sum of eight ranks, mean of the draws, with outliers and for N(0, 1). The plot has what is published beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from measure_formats import RANKS, inputs

from alltoallv.quantization.spec import Quantization
from alltoallv.testing import quantized as reference
from alltoallv.testing.quantized_formats import FORMATS

# Accuracy over the unquantized model's: QuickReduce INT3, groups of 32 with float16 scales, three models of experts
# (vllm-project/vllm pull request 45666).
PUBLISHED = (3 / 8 + 2 / 32, (0.9922, 0.9953, 1.0055))
KINDS = ("integers", "integers, rotated and with spikes", "one of both", "floats")


def error(name: str, group: int, draws: int, count: int, outliers: bool) -> float:
    """Of a sum, relative L2; the collectives have the reference's bits."""
    found = []
    for draw in range(draws):
        rng = np.random.default_rng(draw)
        normal = [rng.normal(size=count).astype(np.float32) for _ in range(RANKS)]
        xs = [x.reshape(-1) for x in inputs(draw, count)] if outliers else normal
        exact = np.sum(np.array(xs, np.float64), axis=0)
        off = reference.dequantize_sum([reference.quantize(x, group, format=name) for x in xs]) - exact
        found.append(np.linalg.norm(off) / np.linalg.norm(exact))
    return float(np.mean(found))


def kind(name: str) -> str:
    how = FORMATS[name]
    return KINDS[(0, 2, 1)[how.rotated + how.spikes] if how.is_integer else 3]


def measured(rows: list[dict[str, Any]], draws: int, count: int) -> list[dict[str, Any]]:
    made = []
    for row in rows:
        if "group_size" not in row:
            continue
        name, group = row["terms"], row["group_size"]
        how = Quantization(name, group)
        sent = (how.code_bytes(count) + how.scale_bytes(count)) / count
        errors = [error(name, group, draws, count, outliers) for outliers in (False, True)]
        made.append(row | {"bytes": sent, "normal": errors[0], "outliers": errors[1], "kind": kind(name)})
    return made


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).ravel()
    panels = (
        ("normal", "relative error of a sum of 8 ranks, N(0, 1)"),
        ("outliers", "relative error of a sum of 8 ranks, outliers"),
        ("lost", "MiniLM on 4 ranks: 1 − median cosine"),
        ("kept", "answers unchanged, %"),
    )
    for at, (key, label) in zip(axes, panels, strict=True):
        for number, name in enumerate(KINDS):
            those = sorted((row for row in rows if row["kind"] == name), key=lambda row: row["bytes"])
            xs = [row["bytes"] for row in those]
            style: dict[str, Any] = {"color": f"C{number}", "marker": "osDv"[number], "linestyle": ""}
            if key == "kept":
                at.plot(xs, [100 * row["kept"][0] for row in those], **style)
                at.plot(xs, [100 * row["kept"][1] for row in those], fillstyle="none", **style)
            else:
                ys = [1 - row["median"] if key == "lost" else row[key] for row in those]
                at.plot(xs, ys, label=name, **style)
        at.set_xlabel("bytes on the wire per element")
        at.set_ylabel(label)
        at.grid(alpha=0.3)
        if key != "kept":
            at.set_yscale("log")
    x, recovered = PUBLISHED
    axes[3].plot([x] * len(recovered), [100 * share for share in recovered], "k+", label="QuickReduce INT3: accuracy")
    axes[3].plot([], [], "o", color="0.4", label="nearest neighbour")
    axes[3].plot([], [], "o", color="0.4", fillstyle="none", label="second nearest")
    axes[3].legend(fontsize=8)
    axes[0].legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True, metavar="FILE", help="what the example has saved")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--count", type=int, default=1 << 16, help="elements, a multiple of 1024")
    options = parser.parse_args()
    rows = measured(json.loads(options.minilm.read_text()), options.draws, options.count)
    print("| format | group | bytes | error, N(0, 1) | with outliers | median cosine | nearest kept | second |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        kept = " | ".join(f"{share:.1%}" for share in row["kept"])
        errors = f"{row['normal']:.1e} | {row['outliers']:.1e}"
        print(
            f"| `{row['terms']}` | {row['group_size']} | {row['bytes']:.3f} | {errors} | {row['median']:.6f} | {kept} |"
        )
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
