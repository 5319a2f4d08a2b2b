"""Communicators over two and three hosts: the bits of one host, errors that name ranks, and no wait without end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alltoallv.errors import BackendUnavailableError
from alltoallv.testing.hosts import Host, HostRanks, mpi_command, no_launcher, torchrun_environment
from alltoallv_tools.ports import free_port

# From a cause to its error, in seconds: milliseconds on an idle machine, and less than the timeouts of 30 s and more.
LIMIT = 20
FOLDER = Path(__file__).parent
NOTICE = re.compile(r"^alltoallv: domain '.*': rank (\d+) was lost: .*\n", re.MULTILINE)  # once of each that died
OTHER_CLOCK = ("unshare", "--time", "--monotonic", "100000", "--boottime", "100000", "--fork", "--kill-child")


class OtherClock(Host):
    """A host that was started at another time."""

    def command(self, *arguments: str) -> list[str]:
        return super().command(*OTHER_CLOCK, *arguments)


@pytest.fixture(scope="module")
def hosts(two_hosts: Callable[..., AbstractContextManager[list[Host]]]) -> Iterator[list[Host]]:
    with two_hosts(count=3) as joined:
        yield joined


def told(place: Sequence[Host | None], *program: str, port: int, lost: Sequence[int] = ()) -> list[str]:
    """What a program of programs.py has printed on each rank; all but those that are lost must have ended well."""
    ranks = HostRanks(FOLDER / "programs.py", place, *program, port=port)
    texts = ranks.outputs()
    assert [rank for rank, code in enumerate(ranks.codes()) if code != 0 and rank not in lost] == [], "\n".join(texts)
    for rank, text in enumerate(texts):
        died = [int(number) for number in NOTICE.findall(text)]
        assert rank in lost or (sorted(set(died)) == sorted(died) and set(died) <= set(lost)), text
        assert rank in lost or died or " was lost: " not in text, text
    return [NOTICE.sub("", text) for text in texts]


def lines_of(place: Sequence[Host | None], folder: Path) -> list[list[str]]:
    """What every collective gives on ranks placed so, by rank."""
    ranks = HostRanks(FOLDER / "numpy_program.py", place, "env", str(folder), port=free_port())
    texts = ranks.outputs()
    assert ranks.codes() == [0] * len(place), "\n".join(texts)
    return read_lines(folder, len(place))


def read_lines(folder: Path, size: int) -> list[list[str]]:
    return [(folder / f"rank{rank}.txt").read_text().splitlines() for rank in range(size)]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return lines_of([None] * 4, tmp_path_factory.mktemp("one-host"))


@pytest.mark.parametrize("places", ["abca", pytest.param("aabb", marks=pytest.mark.slow)])
def test_every_collective_has_the_bits_of_one_host(
    hosts: list[Host], one_host: list[list[str]], tmp_path: Path, places: str
) -> None:
    """Three hosts with unequal numbers of ranks, which do not follow each other on a host; and two hosts."""
    assert lines_of([hosts["abc".index(name)] for name in places], tmp_path) == one_host
    assert len(one_host[0]) > 250


@pytest.mark.slow
@pytest.mark.parametrize("places", ["abcba", "abbbb"])
def test_five_ranks_in_any_place(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory, places: str) -> None:
    place = [hosts["abc".index(name)] for name in places]
    expected = lines_of([None] * 5, tmp_path_factory.mktemp("one"))
    assert lines_of(place, tmp_path_factory.mktemp("several")) == expected


@pytest.mark.parametrize("library", ["mpich", pytest.param("openmpi", marks=pytest.mark.slow)])
def test_mpi_carries_what_goes_between_hosts(
    hosts: list[Host], one_host: list[list[str]], tmp_path: Path, library: str
) -> None:
    run_by_mpi(library, hosts[:2], tmp_path, "numpy_program.py", "mpi", str(tmp_path))
    assert read_lines(tmp_path, 4) == one_host


def test_a_communicator_is_dropped_while_mpi_carries_its_call(hosts: list[Host], tmp_path: Path) -> None:
    (folder := tmp_path / "told").mkdir()
    said = run_by_mpi("mpich", hosts[:2], tmp_path, "programs.py", "dropped", str(folder))
    assert all(f"rank {rank} goes on" in said for rank in range(4)), said


@pytest.mark.parametrize(
    ("library", "how", "victim", "after"),
    [
        ("mpich", "kill", 2, 0.05), ("mpich", "kill", 3, 0.2), ("mpich", "kill", 0, 0.3), ("mpich", "kill", 1, 0.1),
        ("openmpi", "kill", 2, 0.1), ("openmpi", "exit", 3, 0.1), ("openmpi", "raise", 1, 0.2),
    ],
)  # fmt: skip
def test_mpi_names_nobody_who_lives(
    hosts: list[Host], tmp_path: Path, library: str, how: str, victim: int, after: float
) -> None:
    """At whatever moment a rank dies, or the one over which its host's rows go; MPI's launcher may then end others."""
    folder = tmp_path / "told"
    folder.mkdir()
    arguments = "programs.py", "lost_over_mpi", how, str(victim), str(after), str(folder)
    said = run_by_mpi(library, hosts[:2], tmp_path, *arguments, ends=True)
    told = re.findall(r"rank (\d) tells: PeerLostError: (.*?)(?=rank \d tells|\n)", said)
    alive = {rank for rank, _ in told}
    assert alive, said
    assert str(victim) not in alive
    for _, text in told:
        named = re.findall(r"rank (\d) (?:was lost|has left)", text)
        assert len(named) == 1, text
        assert named[0] not in alive, said


def run_by_mpi(library: str, hosts: list[Host], folder: Path, program: str, *arguments: str, ends: bool = False) -> str:
    """What the program has printed on two ranks of every host; ``ends``: MPI's launcher may end the job."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: the session `hosts` has it")
    try:
        command = mpi_command(library, hosts, 2, folder)
    except BackendUnavailableError as error:
        pytest.skip(f"{error}: the session `hosts` has it")
    (places := folder / "places").mkdir(exist_ok=True)
    # A shell that stays, also where MPICH's launcher tells it of others' ends; with 0 if it shall not hear of a death.
    rank = f'trap "" USR1; place=$(mktemp -p {places}); readlink /proc/self/ns/net > $place; "$0" "$@"; code=$?; '
    # MPICH's launcher writes to daemons that end with their ranks, dies of that, and the other ranks end with it: so
    # each stays until all have noted how they ended.
    if ends:
        rank += "exit 0"
    else:
        noted = f"[ $(cat {places}/* | wc -l) -ge {4 * len(hosts)} ]"
        rank += f"echo $code >> $place; for _ in $(seq 300); do {noted} && break; sleep 0.1; done; exit $code"
    command += ["sh", "-c", rank]
    command += [sys.executable, program if program == "-c" else str(FOLDER / program), *arguments]
    ended = subprocess.run(command, env=no_launcher(), capture_output=True, text=True, timeout=200, check=False)
    told = [place.read_text().split() for place in places.iterdir()]
    right = ended.returncode in (0, -signal.SIGPIPE) and all(codes == ["0"] for _, *codes in told)
    assert ends or right, f"{ended.returncode} {told}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    ranks_on = Counter(place for place, *_ in told)
    assert [*ranks_on.values()] == [2] * len(hosts), f"not on {len(hosts)} hosts: {ranks_on}"
    return ended.stdout


def test_a_killed_daemon_of_open_mpi_leaves_the_next_one_alone(hosts: list[Host], tmp_path: Path) -> None:
    """Both have the same process id, and a session folder of this name."""
    parent = "open(f'/proc/{os.getppid()}/stat').read().split()[3]"  # of the shell that run_by_mpi starts
    begun = f"all(map(os.path.getsize, glob.glob('{tmp_path}/places/*'))) and len(os.listdir('{tmp_path}/places')) == 4"
    kill = f"import glob, os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '3':\n  while not ({begun}): pass\n"
    kill += f"  os.kill(int({parent}), 9)"
    run_by_mpi("openmpi", hosts[:2], tmp_path, "-c", kill, ends=True)
    assert [*tmp_path.rglob("prted.*")], "no daemon was killed"
    (folder := tmp_path / "next").mkdir()
    run_by_mpi("openmpi", hosts[:2], folder, "-c", "pass")


def test_the_example_makes_its_hosts(hosts: list[Host]) -> None:
    program = FOLDER.parents[1] / "examples" / "several_hosts.py"
    ended = subprocess.run(
        [sys.executable, str(program)], env=no_launcher(), capture_output=True, text=True, timeout=120, check=True
    )
    said = ended.stdout.splitlines()
    sums = [line.split(" has the sum ")[1] for line in said if " has the sum " in line]
    assert sums == ["0x1.0000000000000p+0 0x1.0000000000000p+1 0x1.8000000000000p+1"] * 4
    assert sum("rank 0 has elements: 3, rank 3 has elements: 4" in line for line in said) == 4
    assert sum("GB/s to a rank of the" in line for line in said) == 2


def test_a_rank_that_leaves_is_not_lost(hosts: list[Host]) -> None:
    """Its connections end before the other host has heard that it leaves, from a rank that is stopped."""
    a, b, _ = hosts
    said = told([a, a, b, b], "leaves_unheard", port=29_720)
    assert re.fullmatch(r"PeerLostError: .*rank 3 has left domain 'default': .*\n", said[0]), said[0]
    assert said[1:] == ["", "", ""]


def test_run_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    """`run` on each host: rank 0 is on the first, and the ranks of both add what they have."""
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, os, alltoallv\n"
        "from alltoallv.numpy import all_reduce\n"
        "comm = alltoallv.Communicator.from_env()\n"
        "print(os.environ['LOCAL_RANK'], all_reduce(np.array([10**comm.rank]), group=comm))\n"
    )
    env = no_launcher() | {"ALLTOALLV_JOB_SECRET": "one for both"}
    started = []
    for number, host in enumerate(hosts[:2]):
        options = ["--nnodes", "2", "--node-rank", str(number), "--master", f"{hosts[0].address}:29700"]
        command = [sys.executable, "-m", "alltoallv", "run", "-n", "2", *options, str(program)]
        started.append(subprocess.Popen(host.command(*command), env=env, stdout=subprocess.PIPE, text=True))
    said = [sorted(process.communicate(timeout=120)[0].splitlines()) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said == [["[0] 0 [1111]", "[1] 1 [1111]"], ["[2] 0 [1111]", "[3] 1 [1111]"]]


@pytest.mark.slow  # a minute
def test_three_hosts_of_two_ranks(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = lines_of([None] * 6, tmp_path_factory.mktemp("one"))
    assert lines_of([host for host in hosts for _ in range(2)], tmp_path_factory.mktemp("tcp")) == expected
    for library in ("mpich", "openmpi"):
        folder = tmp_path_factory.mktemp(library)
        run_by_mpi(library, hosts, folder, "numpy_program.py", "mpi", str(folder))
        assert read_lines(folder, 6) == expected


@pytest.mark.parametrize(
    ("how", "lost"),
    [("kill", [3]), ("kill", [1, 3]), ("kill", [0, 2]), ("exit", [1, 3]), ("exit", [0, 2])],
    ids=lambda value: "".join(map(str, value)),
)
def test_lost_ranks_are_named_on_all_at_once(hosts: list[Host], how: str, lost: list[int]) -> None:
    """One, and on both hosts at once: a rank of each, and the ranks over which each host's rows go."""
    a, b, _ = hosts
    texts = told([a, a, b, b], "lost", how, *map(str, lost), port=29_510, lost=lost)
    for text in (text for rank, text in enumerate(texts) if rank not in lost):
        for line in text.splitlines():
            assert line.startswith("PeerLostError after "), text
            assert any(f": rank {other} " in line for other in lost), text
        assert text.count("PeerLostError") == 2, text
        assert float(text.split("after ")[1].split()[0]) < LIMIT, text


@pytest.mark.parametrize("twice", [0, 1])
def test_a_rank_that_is_there_twice_is_named_with_both_places(hosts: list[Host], twice: int) -> None:
    """On two hosts, of which one may not have rank 0's address."""
    numbers, address = [[0, 0, 1], [0, 1, 1]][twice], hosts[0].address
    ranks = HostRanks(
        FOLDER / "programs.py",
        hosts,
        "meet",
        environment=lambda i: torchrun_environment(numbers[i], 3, 1, address, 29_640),
    )
    texts = ranks.outputs()
    pids = [process.pid for process in ranks.processes]
    for text in texts:
        assert f"InvalidParamError: rank {twice} came to domain 'default' twice, as pid " in text, texts
        assert sum(f"pid {pid} on " in text for pid in pids) == 2, texts


@pytest.mark.parametrize(("meet", "victim"), [("domain", 0), ("domain", 3), ("split", 2)])
def test_a_program_that_ends_while_others_join_is_named_at_once(
    hosts: list[Host], meet: str, victim: int, tmp_path: Path
) -> None:
    a, b, _ = hosts
    for rank, text in enumerate(told([a, a, b, b], "ended", meet, str(victim), str(tmp_path), port=29_620)):
        if rank != victim:
            assert text.startswith("PeerLostError after "), text
            assert f"rank {victim} " in text, text
            assert float(text.split("after ")[1].split()[0]) < LIMIT, text


def test_no_living_rank_is_named(hosts: list[Host]) -> None:
    """At whatever moment a rank dies: also within a host, where the ranks that exchange have other numbers."""
    a, b, _ = hosts
    for trial in range(6):
        victim = (2, 3, 1)[trial % 3]
        arguments = ("lost_at_any_time", str(victim), str(0.05 + 0.03 * trial))
        texts = told([a, a, b, b], *arguments, port=29_520 + 2 * trial, lost=[victim])
        for text in (text for rank, text in enumerate(texts) if rank != victim):
            assert text.startswith("PeerLostError: operator #"), text
            assert f"rank {victim}" in text, text


@pytest.mark.parametrize("how", ["stop", "late"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_silent_leader_does_not_accuse_those_behind_it(
    hosts: list[Host], how: str, victim: int, tmp_path: Path
) -> None:
    """The rows of the other rank on its host have come to it, but not further if it is stopped."""
    a, b, _ = hosts
    texts = told([a, a, b, b], "silent", how, str(victim), str(tmp_path), port=29_580, lost=[victim])
    for rank, text in enumerate(texts):
        if rank == victim:
            continue
        assert text.startswith("CommTimeoutError: rank "), text
        assert f" for rank {victim} (" in text, text
        assert text.count("(pid ") == 1, text
        same_host = rank // 2 == victim // 2
        assert ("stopped" if same_host else "does not answer") in text or how == "late", text


def test_a_check_that_differs_is_refused_while_joining(hosts: list[Host]) -> None:
    a, b, c = hosts
    for text in told([a, b, c], "settings_differ", port=29_590):
        assert text == (
            "InvalidParamError: rank 1 has check = 'off', rank 0 has check = 'always': settings of domain 'default' "
            "must be equal on every rank [A2A-1087]\n"
        )


@pytest.mark.parametrize("lost", [(0,), (1,), (2, 3)], ids=["rank-0", "a-rank", "a-host"])
def test_survivors_go_on_at_once(hosts: list[Host], lost: tuple[int, ...]) -> None:
    """`shrink` where rank 0 is lost, over which rows go, a rank that leads nobody, and all of a host."""
    a, b, c = hosts
    texts = told([a, a, b, b, c], "shrink", *map(str, lost), port=29_540, lost=lost)
    for text in (text for rank, text in enumerate(texts) if rank not in lost):
        assert text.startswith("tcp after "), text
        assert float(text.split()[2]) < LIMIT, text


def test_a_job_grows_between_hosts_and_gets_a_lost_rank_back(hosts: list[Host]) -> None:
    """The newcomer, and its replacement, are on the second host, and find rank 0 on the first."""
    for text in told(hosts[:2], "grows", port=29_670, lost=[2]):
        assert text.splitlines() == ["tcp: 3 ranks in epoch 0", "tcp: 3 ranks in epoch 1"]


@pytest.mark.usefixtures("hosts")  # the program makes such itself
@pytest.mark.parametrize("option", [(), ("--shrink",)], ids=["rejoin", "shrink"])
def test_ranks_of_two_hosts_are_killed_and_replaced_under_load(option: tuple[str, ...]) -> None:
    program = FOLDER.parent / "support" / "replaced_ranks.py"
    command = [sys.executable, str(program), "--rounds", "20", "--transport", "tcp", *option]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_without_descriptors_is_named_to_all_that_join(hosts: list[Host], victim: int) -> None:
    for rank, text in enumerate(told([*hosts[:2], hosts[0]], "starved", str(victim), port=29_530)):
        error, met = text.splitlines()
        assert "Too many open files" in error, text
        assert rank == victim or f"rank {victim} " in error
        assert float(error.split()[1]) < LIMIT, text
        assert met == "met"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_with_few_descriptors_is_named_to_all_that_join(hosts: list[Host], victim: int) -> None:
    """However many it has, whatever takes the last one: accepting a connection, or listing its own addresses."""
    a, b, _ = hosts
    texts = [text.splitlines() for text in told([a, a, b], "few_descriptors", str(victim), port=29_600)]
    for lines in zip(*texts, strict=True):
        joined = [line.endswith("joined") for line in lines]
        assert all(joined) or not any(joined), lines
        for rank, line in enumerate(lines):
            assert ": at once: " in line, lines
            assert joined[0] or rank == victim or f"rank {victim}" in line, lines
    assert not texts[0][0].endswith("joined")
    assert texts[0][-1].endswith("joined")


def test_ranks_that_wait_for_each_other_are_told_both_chains(hosts: list[Host]) -> None:
    a, b, c = hosts
    if subprocess.run([*OTHER_CLOCK, "true"], check=False).returncode == 0:
        c = OtherClock(c.name, c.interface, c.address)
    else:
        print("the kernel has no time namespaces: the clocks of all hosts are alike")
    for text in told([a, a, b, b, c], "crossed", port=29_545):
        assert float(text.split()[1]) < LIMIT, text
        assert "barrier of domain 'first' for rank" in text, text
        assert "barrier of domain 'second' for rank" in text, text


def test_messages_that_nobody_takes_are_among_the_waits(hosts: list[Host]) -> None:
    calls = {"recv": ("recv", "barrier"), "send": ("send", "barrier"), "both": ("send", "send")}
    for text in told(hosts[:2], "crossed_messages", port=29_547):
        errors = {line.split()[0]: line for line in text.splitlines()}
        assert errors.keys() == calls.keys(), text
        for name, line in errors.items():
            assert float(line.split()[1]) < LIMIT, line
            assert all(f"{call} " in line for call in calls[name]), line


def test_messages_that_nobody_takes_yet_take_little_memory_of_the_receiver(hosts: list[Host]) -> None:
    """64 MiB are sent, of which 4 MiB come with their announcements; the rest once it is received."""
    _, text = told(hosts[:2], "offered", port=29_660)
    assert float(text.removesuffix(" MiB\n")) < 16, text


def test_ranks_that_end_before_others_need_nothing_of_them(hosts: list[Host]) -> None:
    """Rank 0, over which rows go, destroys its communicator while others are still receiving its data."""
    told([*hosts, hosts[0]], "leaving", port=29_520)


def test_program_that_ends_while_a_thread_waits_says_so(hosts: list[Host]) -> None:
    assert (
        "rank 0 aborted: the process exits while calls are pending"
        in told(hosts[:2], "ends_while_waiting", port=29_525)[1]
    )


@pytest.mark.parametrize("path", ["auto", "staged"])
def test_large_messages_inside_a_host_use_shared_memory(hosts: list[Host], path: str) -> None:
    a, b, _ = hosts
    texts = told([a, a, b], "within", path, port=29_550)
    assert all("bytes over the network" in text for text in texts[:2])


@pytest.mark.parametrize("lost", [1, 2], ids=["the-sender", "another-host"])
def test_a_loss_ends_large_messages_inside_a_host(hosts: list[Host], lost: int) -> None:
    a, b, _ = hosts
    texts = told([a, a, b], "within_lost", str(lost), port=29_555, lost=[lost])
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {lost} was lost" in texts[rank], texts[rank]


def test_a_job_on_several_hosts_without_an_address_is_refused_at_once(hosts: list[Host]) -> None:
    env = torchrun_environment(0, 4, 2, "", 0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del env[name]
    code = "import alltoallv; alltoallv.Communicator.from_env()"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "set MASTER_ADDR and MASTER_PORT" in ended.stderr, ended.stderr
