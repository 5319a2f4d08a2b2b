"""Every collective in every front end that is installed here: the same values, the same errors.

The cases of a column run in one job; a test each looks at what its case came to.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import CASES, CULPRIT, MEMORY, SIZE, WRONG, Arguments, Case, Part
from column import Column
from columns import COLUMNS, RUNS

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import AllToAllVError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal

COUNTS = (
    "send_counts", "recv_counts", "sdispls", "rdispls", "input_split_sizes", "output_split_sizes", "local_count",
    "global_count",
)  # fmt: skip

Outcome = tuple[str, Any, Any]  # "came" and the output, or the class's names and the text


def offers(column: type[Column], case: Case) -> bool:
    """Whether the column has the collective and what the case needs."""
    return not column.lacks.keys() & {case.function, *case.needs}


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
        if name in COUNTS:
            return as_counts[case.counts](value) if isinstance(value, list) and case.mistake is None else value
        if isinstance(value, list):
            return [one("", entry) for entry in value]
        if isinstance(value, Part):
            return memory[value.begin : value.end]
        return column.tensor(value) if isinstance(value, np.ndarray) else value

    return {name: one(name, value) for name, value in arguments.items()}


def came(column: Column, case: Case, group: Any, rank: int) -> Outcome:
    arguments = case.arguments(rank)
    if case.mistake and (case.everywhere or rank == CULPRIT):
        arguments |= case.mistake()
    try:
        output = column.call(case.function, group, made(column, case, arguments))
    except Exception as error:
        return "raised", [kind.__name__ for kind in type(error).__mro__], str(error)
    if isinstance(output, list):
        return "came", [column.array(x) for x in output], None
    return "came", None if output is None else column.array(output), None


def run(communicator: Communicator, kind: type[Column], cases: list[Case]) -> dict[str, Outcome]:
    column, found = kind(), {}
    with column.group(communicator) as group:
        for case in cases:
            found[case.name] = came(column, case, group, communicator.rank)
            # Whatever a case did, the ranks go on together.
            try:
                told = av.all_gather(np.array(communicator.rank), group=communicator)
            except AllToAllVError as error:
                error.add_note(f"a rank did not go on after {case.name}")
                raise
            assert told.tolist() == list(range(SIZE)), case.name
    return found


Found = Callable[[type[Column]], list[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases of a column came to on every rank."""
    kept: dict[str, list[dict[str, Outcome]]] = {}

    def of(column: type[Column]) -> list[dict[str, Outcome]]:
        if column.name not in kept:
            store = {"MATRIX_STORE": str(tmp_path_factory.mktemp("store") / uuid.uuid4().hex)}
            cases = [case for case in CASES if offers(column, case)]
            kept[column.name] = ranks(SIZE, env=store)(run, column, cases)
        return kept[column.name]

    return of


OFFERED = [(column, case) for case in CASES for column in RUNS if offers(column, case)]


@pytest.mark.parametrize(("column", "case"), OFFERED, ids=[f"{case.name}-{column.name}" for column, case in OFFERED])
def test_case(found: Found, column: type[Column], case: Case) -> None:
    outcomes = [outcome[case.name] for outcome in found(column)]
    if case.mistake:
        check_error(column, case, outcomes)
        return
    assert case.want
    wanted = case.want([case.arguments(rank) for rank in range(SIZE)])
    for rank, ((how, output, text), expected) in enumerate(zip(outcomes, wanted, strict=True)):
        assert how == "came", f"rank {rank}: {output[0]}: {text}"
        if isinstance(expected, list):
            for j, (part, one) in enumerate(zip(output, expected, strict=True)):
                assert_bits_equal(part, one, f"rank {rank}, entry {j}")
        elif expected is None:
            assert output is None
        else:
            assert_bits_equal(output, expected, f"rank {rank}")


def check_error(column: type[Column], case: Case, outcomes: list[Outcome]) -> None:
    names = column.row(case.function).names
    kind, text = case.error
    for name in case.arguments(0) | (case.mistake() if case.mistake else {}):
        text = text.replace(f"{{{name}}}", names.get(name, name))
    text = text.replace("{input}", names.get("input", "input"))
    kind, text = column.own.get(case.name, (kind, text))
    how, kinds, said = outcomes[CULPRIT]
    assert (how, said) == ("raised", text)
    assert kind in kinds
    if case.everywhere:
        return
    for how, kinds, said in (outcomes[rank] for rank in range(SIZE) if rank != CULPRIT):
        assert how == "raised"
        assert said.startswith("operator #")
        assert said.endswith(f"failed on rank {CULPRIT}: {text}")
        assert kind in kinds


@pytest.mark.parametrize("column", RUNS, ids=lambda column: column.name)
def test_what_a_front_end_lacks_it_has_not(column: type[Column]) -> None:
    functions = column().functions
    offered = [name for name in {case.function for case in CASES} if name not in column.lacks]
    assert all(hasattr(functions, column.row(name).name) for name in offered)
    assert not [name for name in column.lacks if hasattr(functions, name)]


def test_every_case_of_the_lists_is_one() -> None:
    for column in COLUMNS:
        assert column.own.keys() <= {case.name for case in WRONG}
