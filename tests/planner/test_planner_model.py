"""The formulas of docs/plan.md, by hand and against sums over every pair."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from started import alltoallv

from alltoallv.errors import InvalidParamError
from alltoallv_tools.bench.cases import Case
from alltoallv_tools.cli import plan as cli
from alltoallv_tools.planner import fit, model, patterns
from alltoallv_tools.planner.topology import PRESETS, Level, Topology

ONE = Topology("one", (Level("all", 0, 2.0, 10.0),), message_us=0.5, start_us=1.0)
TWO = Topology("two", (Level("server", 4, 1.0, 100.0, 20.0), Level("network", 0, 5.0, 10.0)), start_us=1.0)


def test_one_class_by_hand() -> None:
    """4 ranks, 40 kB each, 30 kB of them to others; 10 GB/s are 10 kB per microsecond."""
    assert model.all_to_all_v(ONE, 4, 40_000) == pytest.approx(1 + 2 + 3 * 0.5 + 3)
    assert model.all_to_all_v(ONE, 4, 40_000, algorithm="pairwise") == pytest.approx(1 + 3 * 2.5 + 3)
    assert model.all_to_all_v(ONE, 4, 40_000, algorithm="hierarchical") == pytest.approx(1 + 2 + 1.5 + 3)
    assert model.all_to_all_v(ONE, 2, 40_000) == pytest.approx(1 + 2 + 0.5 + 2)
    assert model.all_to_all_v(ONE, 4, 40_000, "sparse") == pytest.approx(1 + 2 + 0.5 + 4)
    assert model.all_to_all_v(ONE, 1, 40_000) == 1.0


def test_two_classes_by_hand() -> None:
    """8 ranks in two servers, 80 kB each: 30 kB inside over links of 20, 40 kB outside."""
    assert model.all_to_all_v(TWO, 8, 80_000) == pytest.approx(1 + 5 + 4)
    # Inside: 3 of 4 parts of 80 kB, a third of them per link; outside: half of 80 kB in one message.
    assert model.all_to_all_v(TWO, 8, 80_000, algorithm="hierarchical") == pytest.approx(1 + (1 + 1) + (5 + 4))
    assert model.all_to_all_v(TWO, 8, 80_000, algorithm="pairwise") == pytest.approx(1 + 7 * 5 + 7)


def test_reductions_by_hand() -> None:
    exact = model.all_reduce(ONE, 4, 40_000, bits=32)
    assert exact == pytest.approx(1 + 2 * (2 + 1.5 + 3) + 50_000 / 1e6)  # the sum reads 40 kB and writes 10 kB
    packed = 40_000 / 4 + 40_000 / 128
    kernels = (packed + packed / 4 + 2 * (40_000 + packed)) / 1e6
    assert model.all_reduce(ONE, 4, 40_000, bits=8) == pytest.approx(1 + 2 * (2 + 1.5 + packed * 3 / 4 / 1e4) + kernels)
    # Two levels: 3/4 of the vector inside, a third of them per link, then 1/2 of a quarter outside, there and back. The
    # sums read 80 kB and write 20, then read 20 and write 10.
    assert model.all_reduce(TWO, 8, 80_000, "two-level", bits=32) == pytest.approx(
        1 + 2 * (1 + 20_000 / 2e4) + 2 * (5 + 10_000 / 1e4) + 130_000 / 1e6
    )
    r = 1 / 4 + 1 / 128  # on the wire; a partial sum is written in float32 and quantized again
    kernels = 80 * (1 + r) + 80 * r + 20 + 20 * (1 + r) + 20 * r + 10 * r + 80 * (1 + r)
    assert model.all_reduce(TWO, 8, 80_000, "two-level", bits=8) == pytest.approx(
        1 + 2 * (1 + r * 1) + 2 * (5 + r * 1) + kernels / 1e3
    )


def test_processors_are_shared_by_the_ranks_of_a_host() -> None:
    """What a host of 8 ranks on 2 processors needs does not depend on how many hosts there are."""
    host = Level("host", 8, 1.0, 10.0, workers=2)
    both = Topology("hosts", (host, Level("network", 0, 5.0, 1e6)))
    memory = replace(host, curve=((8, 1.0, 10.0),), waits=((2, 1.0), (8, 1.0)))
    for first, moved in ((host, 7 / 8), (memory, 1.0)):  # in memory a rank's own part moves as well
        topology = replace(both, levels=(first, both.levels[1]))
        alone = model.all_to_all_v(topology, 8, 1e6, algorithm="hierarchical")
        assert alone == pytest.approx(1 + 1e6 * moved / (10e3 * 2 / 8))
        for size in (16, 1024, 100_000):
            total = model.all_to_all_v(topology, size, 1e6, algorithm="hierarchical")
            assert total == pytest.approx(alone + 5, rel=0.01)


def test_steps_in_shared_memory_are_no_quicker_than_messages_at_once() -> None:
    """Between two ranks both are one message, whatever it goes over; a rank's own part moves as well."""
    for curve in ((), ((2, 2e6, 10.0),)):
        topology = Topology("host", (Level("host", 0, 1.0, 10.0, curve=curve),))
        flat, steps = (model.all_to_all_v(topology, 2, 1e6, algorithm=name) for name in ("flat", "pairwise"))
        assert flat == pytest.approx(steps)
        assert flat == pytest.approx(1 + (100 if curve else 50))


def test_a_fit_gives_back_the_topology_that_made_the_rows() -> None:
    """Whatever the pattern, and also where ranks outnumber processors."""
    host = Level(
        "host", 0, 3.0, 8.0, curve=((2, 2e6, 12.0), (2, 2e7, 6.0), (4, 1e8, 8.0)), waits=((2, 3), (4, 20), (8, 100))
    )
    host = replace(host, workers=2)
    made = Topology("made", (host,))
    rows = [
        {
            "np": size,
            "nbytes": nbytes,
            "collective": "alltoallv",
            "pattern": pattern,
            "times": {"ours": {"min_us": model.all_to_all_v(made, size, nbytes, pattern)}},
        }
        for size in (2, 4, 8)
        for nbytes in (1024 * 4**k for k in range(9))
        for pattern in patterns.NAMES
    ]
    fitted = fit.fit({"machine": {"cpus": 2}, "rows": rows})
    assert len(fitted.checks) == 3 * 4 * len(patterns.NAMES)
    assert fitted.within == len(fitted.checks)
    slow = [{**row, "times": {"ours": {"min_us": 2 * row["times"]["ours"]["min_us"]}}} for row in rows]
    assert fit.fit({"machine": {"cpus": 2}, "rows": [*slow, *rows, *slow]}) == fitted  # measured again in a slow spell
    exact = fit.shared_memory(rows, 2)
    assert max(abs(each.error) for each in fit.check(exact, rows)) < 0.05
    for fastest in (rows[0], rows[-1]):
        fastest["times"]["ours"]["min_us"] *= 3
    assert max(abs(each.error) for each in fit.check(exact, rows)) > 0.5


def test_the_rate_breaks_off_where_the_caches_end() -> None:
    """A fit that knows where foretells the sizes on both sides of it; one that does not, not all of them."""
    curve = tuple((ranks, held, rate) for ranks in (2, 4) for held, rate in ((1e3, 40.0), (1.6e7, 12.0)))
    made = Topology("made", (Level("host", 0, 1.0, 8.0, curve=curve, cached=1.6e7),))
    host = made.levels[0]
    assert [host.port(at / 2, 2) for at in (1, 1.59e7, 1.6e7, 1e9)] == [40, 40, 12, 12]
    assert [host.port(at / 3, 3) for at in (1.59e7, 1.6e7)] == pytest.approx([40, 12])  # between 2 ranks and 4
    assert replace(host, cached=0.0).port(1.2e7 / 2, 2) < 20
    assert replace(host, cached=1.0).port(10, 2) == 40  # no point on this side of it: as if it were not known

    rows = [
        {
            "np": size,
            "nbytes": nbytes,
            "collective": "alltoallv",
            "pattern": "uniform",
            "times": {"ours": {"min_us": model.all_to_all_v(made, size, nbytes)}},
        }
        for size in (2, 4)
        for nbytes in (1024, 10**6, 2 * 10**6, 3 * 10**6, 5 * 10**6, 7 * 10**6, 9 * 10**6, 10**7)
    ]
    known = fit.fit({"machine": {"cpus": 4, "cache_bytes": 3.2e7}, "rows": rows})
    assert known.within == len(known.checks) == 6
    assert fit.fit({"machine": {"cpus": 4}, "rows": rows}).within < 6


@pytest.mark.parametrize("pattern", patterns.NAMES)
@pytest.mark.parametrize("size", [2, 8, 64])
def test_closed_forms_equal_the_sums_over_all_pairs(pattern: str, size: int) -> None:
    """HCCL's sum over steps of the heaviest pair, and the heaviest receiver, from the counts that `bench` uses."""
    case = Case("alltoallv", 1 << 26, "int8", pattern)
    counts = case.counts(size) / case.count
    ranks = np.arange(size)
    steps = sum(counts[ranks, (ranks + k) % size].max() for k in range(1, size))
    load = patterns.load(pattern, size)
    # tokens of moe are drawn at random; uneven pairs repeat after seven ranks
    loose = {"moe": 0.6, "uneven": 0.35}.get(pattern, 0.02)
    assert load.largest * load.peers == pytest.approx(steps, rel=loose)
    assert load.ingress == pytest.approx(counts.sum(0).max(), rel=loose)


def test_a_topology_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(TWO.as_json())
    assert Topology.read(path) == TWO
    with pytest.raises(InvalidParamError, match=r"expected one of atlas-a2.*A2A-1474"):
        Topology.read("atlas-b9")
    path.write_text('{"name": "x"}')
    with pytest.raises(InvalidParamError, match=r"docs/plan\.md.*A2A-1475"):
        Topology.read(path)
    for levels, extra, message in (
        ('"x"', "", "not as"),
        ('[{"name": "a", "ranks": 0, "alpha_us": NaN, "port_gbps": 1}]', "", "alpha_us of level 'a' is nan"),
        ('[{"name": "a", "ranks": 0, "alpha_us": 1, "port_gbps": 1}]', ', "memory_gbps": 0', "memory_gbps of topo"),
        ('[{"name": "a", "ranks": 0, "alpha_us": 1, "port_gbps": 1, "curve": [[1, 2]]}]', "", "curve of level 'a'"),
        (
            '[{"name": "a", "ranks": 0, "alpha_us": 1, "port_gbps": 1, "waits": [[2, 5], [2, 6]]}]',
            "",
            "waits of level 'a' has two values at one point",
        ),
    ):
        path.write_text(f'{{"name": "x", "levels": {levels}{extra}}}')
        with pytest.raises(InvalidParamError, match=message):
            Topology.read(path)
    path.write_text('"x"')
    with pytest.raises(InvalidParamError, match=r"not as.*A2A-1475"):
        Topology.read(path)
    with pytest.raises(InvalidParamError, match=r"0 for the last.*A2A-1470"):
        Topology("x", (Level("a", 8, 1, 1),))
    with pytest.raises(
        InvalidParamError, match=r"cached of level 'a' is -1, expected a number of at least 0.*A2A-1476"
    ):
        Topology("x", (Level("a", 0, 1, 1, cached=-1),))
    with pytest.raises(InvalidParamError, match=r"does not divide.*A2A-1471"):
        Topology("x", (Level("a", 8, 1, 1), Level("b", 12, 1, 1), Level("c", 0, 1, 1)))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = ["--np", "8,100000", "--bytes", "1M", "--pattern", "moe", "--topology", "h100", "--json", str(path)]
    done = alltoallv("plan", *options)
    assert done.returncode == 0, done.stderr
    assert "int8 is quicker than float16" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["np"] for row in rows] == [8, 100_000]
    assert rows[0]["all_to_all_v"]["flat"] == model.all_to_all_v(PRESETS["h100"], 8, 1 << 20, "moe")
    assert [command("--np", ranks) for ranks in ("1", "100001")] == [2, 2]
    assert "100000" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--np", "x"), "--np is 'x'"),
        (("--np", "64..8"), "--np is '64..8'"),
        (("--bytes", "x"), "--bytes has 'x'"),
        (("--out", "here.json"), "--out is given without --fit"),
        (("--fit", "f.json", "--np", "8"), "--np is given with --fit"),
        (("--fit", "f.json", "--plot", "f.svg"), "--plot is given with --fit"),
        (("--json", "no/where.json"), "a folder that exists"),
        (("--plot", "no/where.svg"), "a folder that exists"),
        (("--plot", "wins.txt"), ".png or .svg"),
    ],
)
def test_arguments_that_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.main(parser.parse_args(arguments))


def test_ranges_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert command("--np", "2,8..50", "--bytes", "1M", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    assert [row["np"] for row in document["rows"]] == [2, 8, 16, 32, 50]
    assert document["topology"]["name"] == "atlas-a2"


def test_the_plot_shows_the_topology_and_ranks_that_were_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, slow = tmp_path / "wins.svg", tmp_path / "slow.json"
    slow.write_text(TWO.as_json())
    for arguments, names in (((), set(PRESETS)), (("--topology", str(slow)), {"two"}), (("--np", "8"), set(PRESETS))):
        assert command("--bytes", "1M", "--plot", str(path), *arguments) == 0
        text = path.read_text()
        assert {name for name in (*PRESETS, "two") if f"<!-- {name} -->" in text} == names


@pytest.mark.parametrize("text", ["{}", "[]", '{"rows": [{"kernel": "sum"}], "machine": {"cpus": 2}}', "no JSON"])
def test_files_that_cannot_be_fitted(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert command("--fit", str(path)) == 2
    assert f"--fit is {path}: " in capsys.readouterr().err


def test_a_fit_on_standard_output(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    kind = {"collective": "alltoallv", "np": 2, "pattern": "uniform"}
    rows = [{**kind, "nbytes": 1 << n, "times": {"ours": {"min_us": 2.0**n / 1e3}}} for n in (10, 12, 14)]
    Path("bench.json").write_text(json.dumps({"machine": {"cpus": 2}, "rows": rows}))
    assert command("--fit", "bench.json", "--out", "-") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["name"] == "fitted"
    assert "predicted within 25%" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.slow
def test_fit_on_measured_rows(tmp_path: Path) -> None:
    """A run on this machine is fitted, and the sizes left out of the fit are foretold. How well depends on how quiet
    the machine is: see docs/performance.md, whose figures are of a quiet one. Here half of them must be within a factor
    of 5.
    """
    measured, fitted = tmp_path / "bench.json", tmp_path / "fitted.json"
    options = ["--np", "2", "--bytes", "1K..16M", "--peers", "", "--api", "plan", "--output", "empty"]
    done = alltoallv("bench", "alltoallv", *options, "--seconds", "0.5", "--json", str(measured), limit=200)
    assert done.returncode == 0, done.stderr
    done = alltoallv("plan", "--fit", str(measured), "--out", str(fitted))
    assert done.returncode == 0, done.stderr
    assert "predicted within 25%" in done.stdout
    document = json.loads(measured.read_text())
    assert document["machine"]["cache_bytes"] >= 1 << 18
    checks = fit.fit(document).checks
    assert len(checks) == 3
    assert 1 / 5 < float(np.median([each.predicted / each.measured for each in checks])) < 5
    assert alltoallv("plan", "--np", "2", "--topology", str(fitted)).returncode == 0
