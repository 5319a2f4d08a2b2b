"""What the commands make of a trace: sentences, the page, Perfetto's and torch's formats, ``top``."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest
from traced_program import COUNTS, LATE, STEPS

from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_reduce, barrier
from alltoallv_tools.cli import main
from alltoallv_tools.trace.page import html
from alltoallv_tools.trace.records import CUT_SHORT, DONE, FAILED, HEADER_BYTES, RUNNING, read
from alltoallv_tools.trace.summary import lateness, tell
from alltoallv_tools.trace.watch import table

ALLTOALLV = [sys.executable, "-m", "alltoallv"]

DESYNC = """\
import numpy as np, os, sys, time
import alltoallv, alltoallv.numpy as an
comm = alltoallv.Communicator.from_env('tp')
for _ in range(40):
    an.all_reduce(np.ones(4), group=comm)
if comm.rank != 2:
    an.all_reduce(np.ones(4), group=comm)
else:
    print('here', flush=True)
    time.sleep(60)
"""


def page_data(html: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)[1])


def test_sentences(folder):
    sentences = tell(read(folder))
    assert any(re.match(r"All 4 ranks have ended barrier #\d+ of '.*'\.$", one) for one in sentences)
    each = ", ".join(rf"rank {rank} waited [\d.]+ [mµ]?s" for rank in range(3)) + r" and rank 3 waited [\d.]+ [mµ]?s"
    late = rf"In .*s of '.*' {each} for others, \d+% of it for rank {LATE}, which came last to \d+ of \d+"
    assert any(re.match(late, one) for one in sentences)


def with_a_folder(path):
    path.mkdir()
    return "Is a directory"


def with_another_file(path):
    path.write_text("{}")
    return "is not a trace: its header lacks 'size'"


def with_text(path):
    path.write_text("no trace")
    return "is not a trace: it does not begin with a header"


def with_bytes(path):
    path.write_bytes(b"\xff\x00\x01")
    return "is not a trace: it does not begin with a header"


def with_other_records(path):
    """The first page of a trace, and then anything but records."""
    path.write_bytes(next(path.parent.glob("*.trace")).read_bytes()[:HEADER_BYTES] + b"\xff" * HEADER_BYTES)
    return "is not a trace: it holds something else"


@pytest.mark.parametrize("spoil", [with_a_folder, with_another_file, with_text, with_bytes, with_other_records])
def test_a_bad_file_is_left_out(spoil, folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "mixed")
    reason = spoil(tmp_path / "mixed" / "other.trace")
    assert len(read(tmp_path / "mixed")) == len(read(folder))
    assert re.search(rf"{reason}.*; left out", caplog.text)


def test_who_is_late(folder):
    (world,) = (domain for domain in read(folder) if domain.size == 4)
    late = lateness(world)
    assert late.caused_ns.argmax() == LATE
    assert late.came_last[LATE] >= STEPS
    assert late.caused_ns[LATE] > 3 * STEPS * 140_000_000  # of 150 ms, by each of 3 ranks


def test_page(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["trace", str(folder), "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    html = page.read_text("utf-8")
    assert not re.search(r"(src|href)\s*=|https?://", html)  # nothing from elsewhere
    (world,) = (domain for domain in page_data(html)["domains"] if domain["size"] == 4)
    sent = np.array(world["matrix"]).sum(0)
    ends, gathers = 4 * 5 * np.eye(4, k=3, dtype=int), np.full((4, 4), 4 * 3)
    reductions = sent - 4 * STEPS * COUNTS - ends - gathers  # split and the reductions
    assert (reductions.sum(1) >= STEPS * 8 * 8).all()
    assert np.array(world["load"]).sum(0).tolist() == (4 * STEPS * COUNTS.sum(0)).tolist()
    late = lateness(next(domain for domain in read(folder) if domain.size == 4))
    assert [row[0] for row in world["late"]] == late.came_last.tolist()
    assert world["left_out"] == 0


@pytest.mark.parametrize("name", ["a<!--<script>", "</script><b>", "a&lt;b"])
def test_a_name_that_is_markup(folder, name):
    """A script's text ends at the first end tag; but not behind `<!--<script>`."""
    domains = read(folder)
    domains[0].name = name
    text = html(domains, name)
    (data,) = re.findall(r'<script id="data" type="application/json">([^<]*)</script>', text)
    assert json.loads(data)["title"] == name
    assert name in [one["name"] for one in json.loads(data)["domains"]]


def test_page_in_a_browser(folder, tmp_path):
    """Where Chromium is at hand the page draws itself there; elsewhere its script is at least complete."""
    page = tmp_path / "page.html"
    assert main(["trace", str(folder), "--html", str(page)]) == 0
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if chromium is None:
        html = page.read_text("utf-8")
        assert set(re.findall(r'\$\("([\w-]+)"\)', html)) <= set(re.findall(r'id="([\w-]+)"', html))
        return
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1400"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    shot = tmp_path / "page.png"
    dump = [*command, "--dump-dom", page.as_uri()]
    dom = subprocess.run(dump, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-drawn="true"' in dom.stdout
    assert f"for rank {LATE}" in dom.stdout
    skew = COUNTS.sum(0).max() / COUNTS.sum(0).mean()
    assert f"The most loaded rank receives {skew:.2f} times the mean" in dom.stdout
    (domain, *_) = page_data(page.read_text("utf-8"))["domains"]
    second = domain["operators"][domain["events"][1][1][3]]  # of rank 1
    keys = "['ArrowDown', 'p', 'n'].forEach(key => t.dispatchEvent(new KeyboardEvent('keydown', {key})))"
    with page.open("a", encoding="utf-8") as file:
        file.write(f"<script>{keys}</script>")
    dom = subprocess.run(dump, capture_output=True, text=True, timeout=120, check=True)
    assert f'aria-live="polite">Rank 1: {second} #' in dom.stdout
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000


def test_perfetto_on_standard_output(folder, capsys):
    assert main(["trace", str(folder), "--perfetto", "-"]) == 0
    out = capsys.readouterr()
    events = json.loads(out.out)["traceEvents"]
    assert "ranks have ended" in out.err
    assert not (folder / "trace.html").exists()
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["name"]].append(event)
    assert {pid for pid, _ in slices} == {0, 1, 2, 3}
    for rank in range(4):
        exchanges = slices[rank, "all_to_all_v"]
        assert [event["args"]["bytes_to"] for event in exchanges] == [(4 * COUNTS[rank]).tolist()] * STEPS
        for event in slices[rank, "waiting"]:
            assert event["dur"] > 0
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {
        f"rank 0 (pid {next(iter(read(folder)[0].ranks.values())).pid} of {os.uname().nodename})"
    }


@pytest.mark.parametrize("nbytes", [0, 5000])
def test_a_rank_that_has_not_begun(folder, nbytes, tmp_path):
    """Its file is empty, or has grown and has no header yet."""
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "late.trace").write_bytes(bytes(nbytes))
    assert [domain.name for domain in read(tmp_path / "copy")] == [domain.name for domain in read(folder)]


def test_top_of_another_host(folder):
    """Its clock began an hour earlier."""
    hour = 3600 * 10**9
    here = read(folder)
    since = [float(row.split()[-5]) for row in table(here, 1)[1:]]
    for domain in here:
        for trace in domain.ranks.values():
            trace.host, trace.clock_ns, trace.records = "elsewhere", trace.clock_ns - hour, trace.records.copy()
            for name in ("begin", "end"):
                trace.records[name] += hour
    for row, before in zip(table(here, 1)[1:], since, strict=True):
        assert float(row.split()[-5]) == pytest.approx(before, abs=2)


def test_flight_recorder_dumps(folder, tmp_path, capsys):
    assert main(["trace", str(folder), "--flight-recorder", str(tmp_path / "dumps")]) == 0
    assert "wrote 4 dumps" in capsys.readouterr().out
    dumps = [pickle.loads((tmp_path / "dumps" / f"rank_{rank}").read_bytes()) for rank in range(4)]
    for dump in dumps:
        assert len(dump["pg_config"]) == 2  # all ranks, and every second one
        kinds = [entry["profiling_name"] for entry in dump["entries"]]
        assert kinds.count("gloo:all_to_all") == STEPS
        assert kinds.count("gloo:all_reduce") == 2 * STEPS
        assert {entry["state"] for entry in dump["entries"]} == {"completed"}


def test_a_job_that_hangs(tmp_path):
    """One rank stays away: both commands name which, while the job runs and after it has been killed."""
    script, folder = tmp_path / "program.py", tmp_path / "trace"
    script.write_text(DESYNC)
    env = os.environ | {"ALLTOALLV_TRACE": str(folder)}
    with subprocess.Popen([*ALLTOALLV, "run", "-n", "4", str(script)], stdout=subprocess.PIPE, env=env) as job:
        assert job.stdout.readline() == b"[2] here\n"
        expected = "Rank 2 has ended all_reduce #40 of 'tp', all others are in all_reduce #41."
        end = time.monotonic() + 30
        while expected not in (said := tell(read(folder))) and time.monotonic() < end:
            pass
        assert expected in said
        top = subprocess.run([*ALLTOALLV, "top", "--once", str(folder)], capture_output=True, text=True, check=True)
        rows = [line.split() for line in top.stdout.splitlines()[1:]]
        assert [row[:2] for row in rows] == [["tp", str(rank)] for rank in range(4)]
        assert rows[2][3:7] == ["has", "ended", "all_reduce", "#40"]
        assert rows[0][3:7] == ["is", "in", "all_reduce", "#41"]
        job.send_signal(signal.SIGKILL)
    assert expected in tell(read(folder))


@pytest.mark.parametrize("first_to_die", [1, 2])
def test_a_job_whose_ranks_die_one_by_one(tmp_path, first_to_die):
    """Those that outlive another have failed by its death: the verdict is that of the moment before."""
    script, folder = tmp_path / "program.py", tmp_path / "trace"
    script.write_text(DESYNC)
    env = os.environ | {"ALLTOALLV_TRACE": str(folder)}
    job = subprocess.Popen(
        [*ALLTOALLV, "run", "-n", "4", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    with job:
        job.stdout.readline()
        expected = "Rank 2 has ended all_reduce #40 of 'tp', all others are in all_reduce #41."
        end = time.monotonic() + 30
        while expected not in tell(read(folder)) and time.monotonic() < end:
            pass
        (domain,) = read(folder)
        os.kill(domain.ranks[first_to_die].pid, signal.SIGKILL)
        job.communicate()
    assert expected in tell(read(folder))
    (domain,) = read(folder)
    states = [int(trace.records["state"][-1]) for trace in domain.ranks.values()]
    died = {first_to_die: DONE if first_to_die == 2 else RUNNING, 2: DONE}
    assert states == [died.get(rank, CUT_SHORT) for rank in range(4)]
    domain.ranks[0].records = domain.ranks[0].records.copy()
    domain.ranks[0].records["state"][-1] = FAILED  # for a reason of its own
    assert expected in tell([domain])


def test_flight_records_of_a_job_that_was_not_traced(ranks, tmp_path, capsys):
    def work(comm):
        for _ in range(3):
            all_reduce(np.ones(4), group=comm)
        if comm.rank == 1:  # once the others are in the barrier
            while {one["operators"][-1]["seq"] for one in comm.flight_record()["ranks"][::2]} != {4}:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            barrier(group=comm)

    ranks(3, fresh=True, outcomes=True, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path)})(work)
    capsys.readouterr()  # what the ranks have said
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"Rank 1 has ended all_reduce #3 of '.*', all others failed in barrier #4\.", told)
    (domain,) = page_data((tmp_path / "trace.html").read_text("utf-8"))["domains"]
    assert [len(rank) for rank in domain["events"]] == [4, 3, 4]


def test_folders_that_cannot_be_written(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert main(["trace", str(folder), "--flight-recorder", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"trace: [Errno 17] File exists: '{tmp_path}/file'\n"
    monkeypatch.setattr(os, "access", lambda path, _: path != folder)  # root may write to all
    assert main(["trace", str(folder)]) == 2
    assert "trace: --html is" in capsys.readouterr().err
    assert main(["trace", str(folder), "--html", "-", "--perfetto", "-"]) == 2
    assert capsys.readouterr() == ("", "trace: --html and --perfetto are both '-', expected two files\n")


def test_flight_records_of_jobs_of_other_sizes(tmp_path, capsys, caplog):
    def write(rank: int, size: int, ranks: list[int]) -> None:
        one = {"seq": size, "operator": "barrier", "dtype": "uint8", "state": "failed", "start_ns": 1, "end_ns": 2}
        record = {"domain": "d", "rank": rank, "size": size}
        record["ranks"] = [{"rank": r, "pid": 10 + r, "left": False, "operators": [one]} for r in ranks]
        (tmp_path / f"flight-d-rank{rank}.json").write_text(json.dumps(record))

    write(0, 2, [0, 1])
    write(3, 4, [0, 1, 2, 3])
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["Both ranks failed in barrier #2 of 'd'.", "All 4 ranks failed in barrier #4 of 'd (2)'."]
    write(0, 2, [0, 7])
    assert main(["trace", str(tmp_path)]) == 0
    assert "rank0.json' is not a flight record: it has rank 7 of 2; left out" in caplog.text
    assert capsys.readouterr().out.startswith("All 4 ranks failed in barrier #4 of 'd'.")
    (tmp_path / "flight-d-rank3.json").unlink()
    assert main(["trace", str(tmp_path)]) == 2
    assert "rank0.json' is not a flight record: it has rank 7 of 2" in capsys.readouterr().err


def test_flight_records_of_ranks_with_other_operators(tmp_path):
    one = {"seq": 1, "dtype": "uint8", "state": "failed", "start_ns": 1, "end_ns": 2}
    called = [["all_reduce", "barrier"], ["barrier", "reduce"]]
    operators = [[{**one, "operator": name} for name in names] for names in called]
    ranks = [{"rank": r, "pid": 10 + r, "left": False, "operators": operators[r]} for r in range(2)]
    record = {"domain": "d", "rank": 0, "size": 2, "ranks": ranks}
    (tmp_path / "flight-d-rank0.json").write_text(json.dumps(record))
    assert main(["trace", str(tmp_path)]) == 0
    (domain,) = page_data((tmp_path / "trace.html").read_text("utf-8"))["domains"]
    assert [[domain["operators"][event[3]] for event in rank] for rank in domain["events"]] == called


def test_flight_records_of_a_job_that_was_started_again(tmp_path, capsys):
    """The first time rank 1 was killed before it could write."""

    def write(name: str, rank: int, operator: str, pid: int) -> None:
        one = {"seq": 1, "operator": operator, "dtype": "uint8", "state": "failed", "start_ns": 1, "end_ns": 2}
        ranks = [{"rank": r, "pid": pid + r, "left": False, "operators": [one]} for r in range(2)]
        record = {"domain": "d", "rank": rank, "size": 2, "ranks": ranks}
        (tmp_path / f"flight-d-{name}.json").write_text(json.dumps(record))

    write("rank0", 0, "barrier", 10)
    write("rank0-2", 0, "all_reduce", 20)
    write("rank1", 1, "all_reduce", 20)
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["Both ranks failed in barrier #1 of 'd'.", "Both ranks failed in all_reduce #1 of 'd (2)'."]


@pytest.mark.parametrize("command", ["trace", "top"])
def test_no_trace(command, tmp_path, capsys):
    assert main([command, str(tmp_path)]) == 2
    assert "holds no *.trace files" in capsys.readouterr().err
