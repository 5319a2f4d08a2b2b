"""The demo: its numbers against an independent computation, its picture, and proof that its comparison can fail."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from started import alltoallv, run

import alltoallv_emulator
from alltoallv_tools.cli import demo as cli_demo
from alltoallv_tools.cli import main as cli
from alltoallv_tools.demo import program, report

# Digits 0 to 9 in the data set, as its description says.
PER_CLASS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
CLASSES = {1: [range(10)], 2: [range(5), range(5, 10)], 4: [range(3), range(3, 5), range(5, 8), range(8, 10)]}


def true_traffic(size: int) -> np.ndarray:
    """scikit-learn's own k-means from the same 8 tokens, and one token after the other."""
    pixels, classes = load_digits(return_X_y=True)
    order = np.argsort(classes, kind="stable")
    pixels, classes = pixels[order], classes[order]
    start = pixels[[112, 336, 561, 786, 1010, 1235, 1460, 1684]]
    labels = KMeans(8, init=start, n_init=1, tol=0).fit_predict(pixels)
    expert = {int(label): number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    traffic = np.zeros((size, size), int)
    for digit, label in zip(classes, labels, strict=True):
        sender = next(rank for rank, mine in enumerate(CLASSES[size]) if digit in mine)
        traffic[sender, expert[int(label)] * size // 8] += 1
    return traffic


def demo(size: int, folder: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}  # not activated
    return alltoallv("demo", "-n", str(size), "--output-dir", str(folder), "--repetitions", "5", env=env)


def test_on_npus_it_is_made_again_where_the_emulator_is_not_built(monkeypatch):
    monkeypatch.setattr(cli_demo, "_has_torch_npu", lambda: False)
    assert any('torch_npu==2.13.*" && python -m alltoallv demo ' in step for step in cli_demo.next_steps())
    monkeypatch.setattr(alltoallv_emulator, "LIBRARY_NAMES", ("libnone.so",))
    assert any('torch_npu==2.13.*" && make demo ' in step for step in cli_demo.next_steps())


def read_table(text: str, size: int) -> np.ndarray:
    """The printed numbers, sums included."""
    rows = [line.split() for line in text.splitlines() if re.match(r" *(from \d+|sum) ", line)]
    assert [row[0] for row in rows] == ["from"] * size + ["sum"]
    return np.array([[int(cell) for cell in row[-size - 1 :]] for row in rows])


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_prints_the_true_traffic(size, tmp_path):
    result = demo(size, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "all 1797 tokens came back bit for bit" in result.stdout.splitlines()
    hints = result.stdout.partition("what to try next:\n")[2]
    assert (f"  . {sys.prefix}/bin/activate\n" in hints) == (sys.prefix != sys.base_prefix)
    assert ("examples/hello.py" in hints) == Path("examples/hello.py").exists()
    page = (tmp_path / "trace.html").read_text("utf-8")
    (data,) = re.findall(r'<script id="data" type="application/json">([^<]*)</script>', page)
    (domain,) = json.loads(data)["domains"]
    names = [domain["operators"][event[3]] for event in domain["events"][0]]
    assert names[:3] == ["all_to_all_v"] * 3  # not the start, in which ranks wait for each other
    assert names[-1] == "quantized_all_reduce"  # nor what is timed
    table, traffic = read_table(result.stdout, size), true_traffic(size)
    assert (table[:-1, :-1] == traffic).all()
    assert table[:-1, -1].tolist() == [sum(PER_CLASS[c] for c in mine) for mine in CLASSES[size]]
    assert table[-1, :-1].tolist() == traffic.sum(axis=0).tolist()
    assert table[-1, -1] == 1797
    assert f"{(traffic == 0).sum()} of {size * size} pairs empty" in result.stdout
    if size == 4:
        assert (traffic == 0).any()
        assert traffic.max() > 50 * traffic[traffic > 0].min()

    paths = dict(re.findall(r"(\w+) ([\d,]+)", re.search(r"data path: (.*)", result.stdout).group(1)))
    moved = {path: int(count.replace(",", "")) for path, count in paths.items()}
    assert moved["self"] == traffic.trace() * 256
    assert sum(moved.values()) == 1797 * 256

    assert "AllToAllVOperation, with ATB's fields, delivers no tokens with other bits" in result.stdout
    error, saved = re.search(r"relative error ([\d.]+)%, (\d+)% fewer bytes", result.stdout).groups()
    assert size == 1 or 0 < float(error) < 2
    assert saved == "74"

    for name in ("dispatch", "return"):
        time, algbw, busbw = map(
            float, re.search(rf"{name} +([\d.]+) µs +([\d.]+) GB/s +([\d.]+)", result.stdout).groups()
        )
        assert algbw == pytest.approx(1797 * 256 / size / (time * 1e-6) / 1e9, abs=0.006, rel=0.01)
        assert busbw == pytest.approx(algbw * (size - 1) / size, abs=0.011)

    picture = (tmp_path / "traffic.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1050, 900)


@pytest.mark.parametrize("size", [1, 4, 12, 40])
def test_picture_shows_the_cells(size, tmp_path):
    from PIL import Image

    traffic = np.arange(size * size).reshape(size, size)
    report.draw_traffic(traffic, tmp_path / "new" / "x.png")
    with Image.open(tmp_path / "new" / "x.png") as image:
        assert image.size == (1050, 900)
        colours = image.convert("RGB").getcolors(1 << 20)
    assert (8, 48, 107) in {colour for _, colour in colours} or size == 1  # the darkest blue: the largest count
    assert (242, 242, 242) in {colour for _, colour in colours}  # grey: the empty pair


@pytest.mark.parametrize("size", [1, 3, 11])
def test_any_number_of_ranks(ranks, size, capsys):
    """11: one rank begins without tokens, three own no expert."""

    def job(comm):
        return program.run(comm, 2)[0]

    assert ranks(size, threads=True)(job) == [0] * size
    assert "all 1797 tokens came back bit for bit" in capsys.readouterr().out


CORRUPT = """
import sys
import numpy as np
from alltoallv_tools.demo import program
real = program.send_back
def send_back(comm, processed, routing):
    returned = real(comm, processed, routing)
    if comm.rank == 1:
        {harm}
    return returned
program.send_back = send_back
sys.exit(program.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("harm", "wrong"),
    [
        ("returned.view(np.uint8)[17, 5] ^= 1", 1),
        pytest.param("returned[[3, 4]] = returned[[4, 3]]", 2, marks=pytest.mark.slow),
        pytest.param("returned[:] = 0", 896, marks=pytest.mark.slow),
    ],
    ids=["one bit", "two tokens swapped", "nothing arrived"],
)
def test_exits_non_zero_when_a_byte_is_wrong(harm, wrong, tmp_path):
    options = ["-n", "2", "--keep-going"]  # both ranks report what they have found, however late
    arguments = ["--output-dir", str(tmp_path)]
    result = run(tmp_path, CORRUPT.format(harm=harm), *options, arguments=arguments, text=True, limit=120)
    assert result.returncode == 1
    assert "all 1797" not in result.stdout
    assert result.stdout.splitlines()[-1] == f"[0] only {1797 - wrong} of 1797 tokens came back bit for bit"
    assert re.search(rf"^\[1\] rank 1: token \d+ .* {wrong} of 896 tokens", result.stderr, re.MULTILINE)
    assert "[0] rank 0: token" not in result.stderr
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(pid \d+\) exited with code 1", result.stderr)


def test_unusable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = demo(2, tmp_path / "file" / "folder")
    assert result.returncode == 1
    assert f"--output-dir is '{tmp_path}/file/folder', where traffic.png cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == "", "nothing is exchanged before"


@pytest.mark.parametrize("arguments", [["-n", "0"], ["-n", "x"], ["--repetitions", "-3"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli(["demo", *arguments])
    assert f"is {arguments[1]!r}, expected an integer of at least 1" in capsys.readouterr().err
