"""``bench``: measures the collectives against peers and against what the memory allows."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from alltoallv import _core
from alltoallv_tools import numbers
from alltoallv_tools.bench import backend, environments, kernels, report
from alltoallv_tools.bench.cases import (
    APIS,
    COLLECTIVES,
    OUTPUTS,
    PATTERNS,
    VARIANTS,
    Case,
    dtypes_of,
    outputs_of,
    parse_bytes,
)
from alltoallv_tools.bench.jobs import Job, Jobs, LibraryError, environment_of
from alltoallv_tools.bench.libraries import contenders_of
from alltoallv_tools.bench.peers import PEERS, SUPPORTED
from alltoallv_tools.bench.rounds import Effort, Failed, Found, measure, row_of
from alltoallv_tools.cli.job import reason_against
from alltoallv_tools.cli.outputs import STANDARD_OUTPUT, check_files, check_plot, write_text

_SUBJECTS = {
    "alltoallv": "all_to_all_v",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "quantized": "quantized_all_reduce",
    "overhead": "what a call costs in each front end, without data",
    "backend": "torch.distributed's calls on backend alltoallv",
    "kernels": "the kernels of quantization, without communication",
}
_PAYLOADS = (*COLLECTIVES, "overhead")
_JOBS = (*_PAYLOADS, "backend")
_USUAL = "alltoallv"  # where no subject is named
_SIZES = {"overhead": "0", "backend": "0", "kernels": "64K,1M,16M"}  # the default; of all others 1K..64M
_RANKS = {"overhead": "1", "backend": "2"}  # the default; of all others 2,4


class _Option(NamedTuple):
    """An option: the subjects that have it, and what argparse takes; {np} and {bytes} in its help are the defaults."""

    subjects: tuple[str, ...]
    help: str
    more: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


# Those that affect results, in the order of `arguments_of`.
_OPTIONS = {
    "np": _Option(_JOBS, "numbers of ranks, such as 2,4,8 (default: {np})"),
    "bytes": _Option((*_PAYLOADS, "kernels"), "bytes of a rank's input: 1K,64K or 1K..64M (default: {bytes})"),
    "dtype": _Option(COLLECTIVES, "a dtype of NumPy (default: float32)"),
    "pattern": _Option(("alltoallv",), "how a rank's bytes are divided (default: uneven)", {"choices": PATTERNS}),
    "api": _Option(COLLECTIVES, "the interface of alltoallv that is called (default: numpy)"),
    "output": _Option(COLLECTIVES, "where the output lies (default: allocated, if --api can)", {"choices": OUTPUTS}),
    "variant": _Option(
        COLLECTIVES,
        "between calls: nothing, the input is written anew, the output is read, or both (default: plain)",
        {"choices": VARIANTS},
    ),
    "formats": _Option(("quantized",), "more formats, such as fp8_e4m3,mxfp8"),
    "ways": _Option(("alltoallv",), "fixed data paths beside the chosen one", {"action": "store_true"}),
    "peers": _Option(_PAYLOADS, f"comma-separated, of {', '.join(PEERS)} (default: those whose environment exists)"),
    "jobs": _Option(
        COLLECTIVES, "jobs in which a line is measured, one after the other (default: 1)", {"type": numbers.count}
    ),
    "no-bind": _Option(_JOBS, "do not give each rank a processor of its own", {"action": "store_true"}),
    "iters": _Option(_JOBS, "measure this many calls instead of --seconds", {"type": numbers.count}),
    "warmup": _Option(
        _JOBS, "calls before each block of measured ones (default: for 5 ms, at least one)", {"type": numbers.count}
    ),
    "device": _Option(("kernels",), "C++ or Triton (default: cpu)", {"choices": ("cpu", "cuda")}),
}

_EPILOG = """\
After Ctrl-C bench still writes what it has measured. docs/bench.md explains all options and columns.
"""
_PEERS = """\
The peers are other libraries: three MPIs, gloo and MindSpore. Each runs in processes and a Python environment of its
own, which bench makes when --peers names it for the first time.
"""
_EXAMPLES = """
Without WHAT it is alltoallv. "bench WHAT --help" lists the options of each.

examples:
  python -m alltoallv bench alltoallv --np 2,4 --bytes 1K..64M --api plan --peers mpich,openmpi,impi
  python -m alltoallv bench alltoallv --np 2 --bytes 64K..64M --ways --output private --peers ""
  python -m alltoallv bench overhead
  python -m alltoallv bench backend --np 2
"""


def completed(arguments: Sequence[str]) -> Sequence[str]:
    """Returns the command's arguments with the usual subject in front where none is named."""
    named = arguments and (arguments[0] in ("-h", "--help") or not arguments[0].startswith("-"))
    return arguments if named else [_USUAL, *arguments]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``bench``."""
    parser.epilog = _PEERS + _EPILOG + _EXAMPLES
    subjects = parser.add_subparsers(dest="collective", metavar="WHAT", title="what to measure", required=True)
    for subject, text in _SUBJECTS.items():
        own = subjects.add_parser(
            subject,
            help=text,
            description=f"Measure {text}.",
            epilog=_PEERS * (subject in _OPTIONS["peers"].subjects) + _EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        usual = {"np": _RANKS.get(subject, "2,4"), "bytes": _SIZES.get(subject, "1K..64M")}
        for name, option in _OPTIONS.items():
            if subject in option.subjects:
                names = ("-n", "-np", "--np") if name == "np" else (f"--{name}",)
                more = (
                    {"choices": [each for each in APIS if outputs_of(each, subject)]} if name == "api" else option.more
                )
                own.add_argument(*names, help=option.help.format(**usual), **more)
            else:
                own.set_defaults(**{name.replace("-", "_"): None})
        own.add_argument(
            "--seconds",
            type=partial(numbers.seconds, or_0=True),
            default=2.0,
            help="time for a line of the table (default: %(default)s)",
        )
        if subject in (*COLLECTIVES, "backend"):
            own.add_argument(
                "--install", action="store_true", help="make an environment for a framework that is missing here"
            )
        own.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file, as docs/bench.md says")
        own.add_argument("--csv", type=Path, metavar="FILE", help="write the times to a file, a line for each library")
        own.add_argument("--plot", type=Path, metavar="FILE", help="draw the times into a file .png or .svg")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark; exits with 1 if any result was wrong or lines are missing, with 130 if interrupted."""
    rows: list[report.Row] = []
    try:
        expected, run = _prepare(args)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    interrupted = False
    try:
        to_log = STANDARD_OUTPUT in (args.json, args.csv)
        with contextlib.redirect_stdout(sys.stderr) if to_log else contextlib.nullcontext():
            run(rows)
    except KeyboardInterrupt:
        print("bench: interrupted; all processes have been ended", file=sys.stderr)
        interrupted = True
    complete = len(rows) == expected and not interrupted
    if args.json:
        settings = {"collective": args.collective, "argv": arguments_of(args), "complete": complete}
        if args.collective in _JOBS:
            settings |= {"api": _api(args), "bound": not args.no_bind}
        write_text(args.json, report.as_json(settings, rows))
    if args.csv:
        write_text(args.csv, report.as_csv(rows))
    if args.plot and rows:
        report.plot(rows, args.plot)
    if interrupted:
        return 130
    return int(not complete or any(report.wrong(row) for row in rows))


def arguments_of(args: argparse.Namespace) -> list[str]:
    """Returns the arguments that affect the results, in the form of a command line."""
    words = [args.collective]
    for option in _OPTIONS:
        value = _value(args, option)
        if value is not None:
            words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return [*words, "--seconds", f"{args.seconds:g}"]


def _value(args: argparse.Namespace, option: str) -> str | int | bool | None:
    """Returns the value of an option; None if it is not given."""
    value: str | int | bool | None = getattr(args, option.replace("-", "_"))
    return None if value is False else value


def _api(args: argparse.Namespace) -> str:
    usual = {"overhead": "core", "backend": "backend"}  # overhead shows the other interfaces as columns
    return args.api or usual.get(args.collective, "numpy")


def _prepare(args: argparse.Namespace) -> tuple[int, Callable[[list[report.Row]], None]]:
    """Returns the number of rows, and the function that measures them.

    Raises:
        ValueError: an argument, or a combination of arguments, makes no sense.
    """
    check_files(json=args.json, csv=args.csv, plot=args.plot)
    check_plot(args.plot)
    payloads = parse_bytes(_SIZES.get(args.collective, "1K..64M") if args.bytes is None else args.bytes)
    if args.plot and (args.collective == "kernels" or not any(payloads)):
        raise ValueError(f"--plot draws times over sizes, which {args.collective} does not have here")
    if args.device == "cuda":
        gpu_kernels = _gpu_kernels()
        return len(payloads) * gpu_kernels.KERNELS, partial(gpu_kernels.run, payloads)
    if args.collective == "kernels":
        return len(payloads) * kernels.KERNELS, partial(kernels.run, payloads, args.seconds)
    sizes, cases, peers = _sizes(args), _cases(args, payloads), _peers(args)
    framework = environment_of("ours", _api(args))
    if framework is not None and not args.install and not environments.is_ready(framework):
        raise ValueError(f"{framework} is not installed here; --install makes an environment that has it")
    return len(sizes) * len(cases), partial(_run, args, sizes, cases, peers)


def _gpu_kernels() -> ModuleType:
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--device is 'cuda', expected cpu: torch is not installed")
    from alltoallv_tools.bench import gpu_kernels

    if reason := gpu_kernels.reason_against():
        raise ValueError(f"--device is 'cuda', expected cpu: {reason}")
    return gpu_kernels


def _sizes(args: argparse.Namespace) -> list[int]:
    least = 2 if args.collective == "backend" else 1  # its groups have two ranks
    text = _RANKS.get(args.collective, "2,4") if args.np is None else args.np
    sizes = [int(n) if n.strip().isdecimal() else 0 for n in text.split(",")]
    if min(sizes) < least:
        raise ValueError(f"--np is {text!r}, expected numbers of at least {least}, such as 2,4")
    if reason := reason_against(max(sizes)):
        raise ValueError(f"--np is {text!r}, {reason}")
    return sizes


def _cases(args: argparse.Namespace, payloads: list[int]) -> list[Case]:
    if args.collective == "backend":
        return backend.CASES
    dtype, output = args.dtype or "float32", args.output or "allocated"
    if args.collective in COLLECTIVES:
        if dtype not in (dtypes := dtypes_of(args.collective)):
            raise ValueError(f"--dtype is {dtype!r}, expected {', '.join(dtypes)} for {args.collective}")
        outputs = outputs_of(_api(args), args.collective)
        output = args.output or outputs[0]
        if output not in outputs:
            places = " or ".join(outputs)
            raise ValueError(f"--output is {output!r}, expected {places} for {args.collective} by --api {_api(args)}")
    pattern = args.pattern or ("uneven" if args.collective == "alltoallv" else "uniform")
    itemsize = np.dtype(dtype).itemsize  # a payload has whole elements, as in nccl-tests
    sizes = [nbytes // itemsize * itemsize for nbytes in payloads]
    formats = [name for name in (args.formats or "").split(",") if name]
    if unknown := sorted(set(formats) - set(_core.code_formats)):
        raise ValueError(f"--formats has {', '.join(unknown)}, expected {', '.join(_core.code_formats)}")
    variant, columns = args.variant or "plain", ",".join(formats)
    return [Case(args.collective, n, dtype, pattern, output, variant, columns, args.ways) for n in sizes]


def _peers(args: argparse.Namespace) -> list[str]:
    able = [name for name in PEERS if args.collective in SUPPORTED[name]]
    if args.peers is None:
        if args.collective == "overhead":
            return []
        return [name for name in able if environments.is_ready("torch" if name == "gloo" else name)]
    peers = list(dict.fromkeys(name for name in args.peers.split(",") if name))
    if unknown := sorted(set(peers) - set(PEERS)):
        raise ValueError(f"--peers has {', '.join(unknown)}, expected {', '.join(PEERS)}")
    if unable := sorted(set(peers) - set(able)):
        raise ValueError(f"--peers has {', '.join(unable)}, which has no {args.collective}")
    return peers


def _run(
    args: argparse.Namespace, sizes: list[int], cases: list[Case], peers: list[str], rows: list[report.Row]
) -> None:
    """Prints the table and adds its rows to ``rows``."""
    api, libraries = _api(args), ["ours", *peers]
    names = [name for library in [*peers, "ours"] for name in contenders_of(library, cases[0], api) if name != "ours"]
    table: ModuleType = backend if args.collective == "backend" else report
    print(table.header(_about(cases[0], api), names))
    repeats = args.jobs or 1
    effort = Effort(args.seconds / repeats, args.iters, args.warmup)
    bar = report.Progress(len(sizes) * len(cases) * repeats)

    def say(text: str) -> None:
        bar.clear()
        print(f"# {text}", file=sys.stderr, flush=True)

    def rows_of_job(
        jobs: Jobs, size: int, able: list[str], found: list[Found], failed: list[Failed]
    ) -> Iterator[report.Row]:
        """Yields the rows so far, with a further job's blocks; libraries that fail are taken out of ``able``."""
        bar.step(f"starting {size} ranks of each", done=False)
        running = _start(jobs, able, size, say)
        for place, case in enumerate(cases):
            if "ours" not in running:
                break
            bar.step(f"{size} ranks, {case.nbytes} bytes", done=False)
            before = dict(running)
            columns = {library: contenders_of(library, case, api) for library in libraries}
            reasons = measure(running, case, effort, columns, found[place])
            failed[place] |= reasons
            for library, reason in reasons.items():
                say(reason)
                jobs.stop(before[library])
            if "ours" in running:
                yield row_of(case, size, found[place], failed[place])
                bar.step(f"{size} ranks, {case.nbytes} bytes")
        able[:] = running
        for job in running.values():
            jobs.stop(job)

    with Jobs(api, bind=not args.no_bind, say=say) as jobs:
        for size in sizes:
            first, able = len(rows), list(libraries)
            found: list[Found] = [{} for _ in cases]
            failed: list[Failed] = [{} for _ in cases]
            for repeat in range(1, repeats + 1):
                for place, row in enumerate(rows_of_job(jobs, size, able, found, failed), first):
                    rows[place : place + 1] = [row]
                    if repeat == repeats:
                        bar.clear()
                        print(table.line(row, names), flush=True)
                if "ours" not in able:
                    break
            if len(rows) == first:  # ours does not even start
                break
    bar.clear()


def _about(case: Case, api: str) -> str:
    text = f"{'backend' if api == 'backend' else case.collective} {case.dtype}" + (
        f" {case.pattern}" if case.collective == "alltoallv" else ""
    )
    if case.collective in COLLECTIVES:
        text += f" {case.variant}, api {api}, output {case.output}"
    computer = report.machine()
    return f"{text}; {computer['cpus']} cpus {computer['model']}, load {computer['load']}"


def _start(jobs: Jobs, libraries: list[str], size: int, say: Callable[[str], None]) -> dict[str, Job]:
    """Starts the libraries and returns those that come up; the others are reported and left out."""
    running: dict[str, Job] = {}
    for library in libraries:
        try:
            running[library] = jobs.start(library, size)
        except LibraryError as error:
            say(f"left out: {error}")
    return running
