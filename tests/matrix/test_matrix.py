"""Every collective in every front end that is installed here: the same values, the same errors.

The cases of a column run in one job for each number of ranks; a test each looks at what its case came to.
"""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from case import MEMORY, UNSEEN, Arguments, Case, Own, Part, Turned
from cases import CASES
from column import Column
from columns import COLUMNS, RUNS
from seeds import SEEDS

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import AllToAllVError
from alltoallv.testing import RankFailures, Ranks
from alltoallv.testing.golden import assert_bits_equal

COUNTS = (
    "send_counts", "recv_counts", "sdispls", "rdispls", "input_split_sizes", "output_split_sizes", "local_count",
    "global_count",
)  # fmt: skip

PATIENCE = 100.0  # seconds: a rank that is new among the others imports its framework first

Outcome = tuple[str, Any, str, int | None]  # "came", the output; or "raised", the names of classes, text and code


def cases_of(column: type[Column]) -> list[Case]:
    """Those that the column offers."""
    return [
        case
        for case in [*CASES, *column.cases]
        if case.dtype in column.dtypes and not column.lacks.keys() & {case.function, *case.needs}
    ]


def made(column: Column, case: Case, arguments: Arguments) -> Arguments:
    """The arguments as the framework's tensors, and counts of the kind that the case wants."""
    memory = column.tensor(MEMORY)
    as_counts: dict[str, Callable[[list[int]], Any]] = {
        "list": lambda values: values,
        "tuple": tuple,
        "array": np.array,
        "int32 array": lambda values: np.array(values, np.int32),
        "tensor": lambda values: column.tensor(np.array(values)),
    }

    def one(name: str, value: Any) -> Any:
        if isinstance(value, list) and name in COUNTS and case.mistake is None:
            return as_counts[case.counts](value)
        if isinstance(value, list) and name not in COUNTS:
            return [one("", entry) for entry in value]
        if isinstance(value, Part):
            return memory[value.begin : value.end]
        if isinstance(value, Turned):
            return column.tensor(np.ascontiguousarray(value.array.T)).T
        if isinstance(value, Own):
            return value.make()
        return column.tensor(value) if isinstance(value, np.ndarray) else value

    return {name: one(name, value) for name, value in arguments.items()}


def came(column: Column, case: Case, group: Any, arguments: Arguments) -> Outcome:
    try:
        theirs = made(column, case, arguments)
        call = functools.partial(column.call, case.function, group)
        if case.gradient:
            output = column.gradient(lambda x: call({**theirs, case.gradient: x}), theirs[case.gradient])
        else:
            output = call(theirs)
    except Exception as error:
        return "raised", [kind.__name__ for kind in type(error).__mro__], str(error), getattr(error, "code", None)
    if isinstance(output, list):
        return "came", [column.array(x) for x in output], "", None
    return "came", None if output is None else column.array(output), "", None


def run(communicator: Communicator, kind: type[Column], cases: list[Case]) -> dict[Any, Outcome]:
    column, found, rank = kind(), {}, communicator.rank
    gone = Communicator.from_env(domain="gone", timeout=PATIENCE)
    gone.destroy()
    with column.group(communicator) as group:
        for case in cases:
            for culprits in culprits_of(kind, case):
                mistake = case.mistake() if case.mistake and rank in culprits else {}
                arguments = case.arguments(rank) | mistake
                found[case.name, culprits] = came(column, case, gone if case.gone else group, arguments)
                try:  # Whatever a case did, the ranks go on together.
                    told = av.all_gather(np.array(rank), group=communicator)
                except AllToAllVError as error:
                    error.add_note(f"a rank did not go on after {case.name} {culprits}: {found[case.name, culprits]}")
                    raise
                assert told.tolist() == list(range(communicator.size)), case.name
    return found


def culprits_of(column: type[Column], case: Case) -> list[tuple[int, ...]]:
    """The ranks that make the mistake, in each of the calls."""
    return case.culprits()[-1:] if case.name in column.unheard else case.culprits()


Found = Callable[[type[Column], int], list[dict[Any, Outcome]]]


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases of a column for so many ranks came to, on every rank."""

    @functools.cache
    def job(column: type[Column], size: int) -> list[dict[Any, Outcome]] | RankFailures:
        store = {"MATRIX_STORE": str(tmp_path_factory.mktemp("store") / uuid.uuid4().hex)}
        try:
            started = ranks(size, env=store, comm_timeout=PATIENCE, timeout=2 * PATIENCE)
            return started(run, column, [case for case in cases_of(column) if case.size == size])
        except RankFailures as error:
            return error

    def of(column: type[Column], size: int) -> list[dict[Any, Outcome]]:
        found = job(column, size)
        if isinstance(found, RankFailures):
            pytest.fail(f"the ranks of {column.name} did not go on: {found}")
        return found

    return of


OFFERED = [(column, case) for column in RUNS for case in cases_of(column)]


@pytest.mark.parametrize(("column", "case"), OFFERED, ids=[f"{case.name}-{column.name}" for column, case in OFFERED])
def test_case(found: Found, column: type[Column], case: Case) -> None:
    for culprits in culprits_of(column, case):
        outcomes = [outcome[case.name, culprits] for outcome in found(column, case.size)]
        if culprits:
            check_error(column, case, outcomes, culprits)
        else:
            check_output(case, outcomes)


def check_output(case: Case, outcomes: list[Outcome]) -> None:
    assert case.want
    wanted = case.want([case.arguments(rank) for rank in range(case.size)])
    for rank, ((how, output, text, _), expected) in enumerate(zip(outcomes, wanted, strict=True)):
        assert how == "came", f"rank {rank}: {output[0]}: {text}"
        if isinstance(expected, list):
            for j, (part, one) in enumerate(zip(output, expected, strict=True)):
                assert_bits_equal(part, one, f"rank {rank}, entry {j}")
        elif expected is UNSEEN:
            continue
        elif expected is None:
            assert output is None
        else:
            assert_bits_equal(output, expected, f"rank {rank}")


def like(expected: str, text: str) -> bool:
    """Whether the text is the expected one, where three dots stand for any, with an id or without."""
    pattern = ".*".join(map(re.escape, expected.split("..."))) + r"( \[A2A-\d{4}\])?"
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def check_error(column: type[Column], case: Case, outcomes: list[Outcome], culprits: tuple[int, ...]) -> None:
    kind, text, code = case.error
    kind, text = column.own.get(case.name, (kind, text))
    names = column.row(case.function).names
    texts = {
        name: names.get(name, name) for name in [*case.arguments(0), *(case.mistake() if case.mistake else ()), "input"]
    }
    texts |= {"is not contiguous": column.not_contiguous, "no group": column.no_group}
    for name, own in texts.items():
        text = text.replace(f"{{{name}}}", own)
    _, classes, _, its_code = outcomes[culprits[0]]
    ours = classes is not None and "AllToAllVError" in classes
    for rank, (how, kinds, said, found_code) in enumerate(outcomes):
        assert how == "raised", f"rank {rank}"
        if case.breach:
            assert like(f"...{text}", said), said
        elif rank in culprits:
            before = "" if case.name in column.own else column.prefix.format(function=case.function, rank=rank)
            assert like(before + text, said), said
        else:
            said_there = text if ours else f"{classes[0]}: {text}"
            assert like(f"operator #... failed on rank {culprits[0]}: {said_there}", said), said
            assert not ours or found_code == its_code
        assert (kind if ours or rank in culprits else "AllToAllVError") in kinds
        assert not ours or code is None or code == found_code
        assert not ours or re.search(r" \[A2A-\d{4}\]$", said), said


@pytest.mark.parametrize("column", RUNS, ids=lambda column: column.name)
def test_what_a_front_end_lacks_it_has_not(column: type[Column]) -> None:
    functions = column().functions
    offered = [name for name in {case.function for case in CASES} if name not in column.lacks]
    assert all(hasattr(functions, column.row(name).name) for name in offered)
    assert not [name for name in column.lacks if hasattr(functions, name)]


def test_every_case_of_the_lists_is_one() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    for column in COLUMNS:
        assert column.own.keys() | column.unheard <= {*names, *(case.name for case in column.cases)}
        needs = {need for case in CASES for need in (case.function, *case.needs)}
        assert column.lacks.keys() <= needs


@pytest.mark.parametrize("case", [case for case in SEEDS if not case.gradient], ids=lambda case: case.name)
def test_the_reference_gives_what_documentations_print(case: Case) -> None:
    assert case.want
    for output, printed in zip(case.want([case.arguments(r) for r in range(case.size)]), case.printed, strict=True):
        assert ([x.tolist() for x in output] if isinstance(output, list) else output.tolist()) == printed
