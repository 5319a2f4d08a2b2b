"""The acceptance table, row by row."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from acceptance_table import BASE, ROWS, Row

from alltoallv import _core
from alltoallv.atb.params import AllToAllVParam, DeviceInfo
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError


def rows(stages: str) -> list[object]:
    return [pytest.param(row, id=row.id) for row in ROWS if row.stage in stages]


def unreachable(param: _core.AllToAllVParam) -> _core.Communicator:
    raise AssertionError("a check that needs no peer asked for a communicator")


def infer(row: Row) -> list[int]:
    return _core.infer_shape(row.make_param(), row.shape, row.dtype, row.format)


@pytest.mark.parametrize("row", rows("C"))
def test_refused_at_create(row: Row) -> None:
    with pytest.raises(InvalidParamError) as caught:
        _core.AllToAllVOperation(row.make_param(), row.device, connect=unreachable)
    assert caught.value.code == row.code


@pytest.mark.parametrize("row", rows("I"))
def test_refused_at_infer_shape(row: Row) -> None:
    _core.AllToAllVOperation(row.make_param(), row.device, connect=unreachable)
    with pytest.raises((InvalidParamError, InvalidTensorError)) as caught:
        infer(row)
    assert caught.value.code == row.code


@pytest.mark.parametrize("row", rows("S-"))
def test_inferred(row: Row) -> None:
    operation = _core.AllToAllVOperation(row.make_param(), row.device, connect=unreachable)
    output = operation.infer_shape([row.input()])
    assert output.shape == infer(row) == [1, sum(row.make_param().recv_counts)]
    assert (output.dtype, output.format) == (row.dtype, row.format)


@pytest.mark.parametrize("row", rows("S"))
def test_refused_at_setup(row: Row) -> None:
    """The refusal comes first; that the peers could not be notified is only added to it."""
    operation = _core.AllToAllVOperation(row.make_param(), row.device)
    output = _core.TensorDesc(*row.output) if row.output else operation.infer_shape([row.input()])
    with pytest.raises(InvalidTensorError, match=r"the peers could not be notified") as caught:
        operation.setup([row.input()], [output])
    assert caught.value.code == row.code


def test_create_checks_keep_their_order() -> None:
    """With everything wrong, repairing one thing at a time meets the checks in ATB's order."""
    device = DeviceInfo("Ascend310P3", -1)
    param = AllToAllVParam(
        rank=-1,
        rank_root=-1,
        send_counts=[-1],
        backend="lccl",
        comm_mode=-1,
        rank_table_file="/nonexistent",
        comm_domain="d" * 129,
        rsv=[1],
    )
    repairs: list[tuple[str, str, object]] = [
        ("rsv", "rsv", b""),
        ("backend", "backend", "hccl"),
        ("the device", "soc_name", "Ascend910B1"),
        ("comm_mode", "comm_mode", 0),
        ("comm_domain", "comm_domain", ""),
        ("rank_table_file", "rank_table_file", ""),
        ("the number of devices", "device_count", 2),
        ("rank_size", "rank_size", 2),
        ("rank is", "rank", 0),
        ("rank_root", "rank_root", 0),
        ("send_counts has 1 entries", "send_counts", [-1, 0]),
        ("sdispls has 0 entries", "sdispls", [0, 0]),
        ("recv_counts has 0 entries", "recv_counts", [0, 0]),
        ("rdispls has 0 entries", "rdispls", [0, 0]),
        (r"send_counts\[0\] is -1, expected at least 0", "send_counts", [0, 0]),
    ]
    for message, name, value in repairs:
        with pytest.raises(InvalidParamError, match=f"^{message}") as caught:
            _core.check_create(param, device)
        assert caught.value.code == 1
        setattr(device if hasattr(device, name) else param, name, value)
    _core.check_create(param, device)


def test_rank_table_or_external_communicator_skips_the_rank_checks(tmp_path: Path) -> None:
    table = tmp_path / "ranks.json"
    table.write_text("{}")
    beyond = BASE | {"rank": 9, "rank_root": 9}
    _core.check_create(AllToAllVParam(**beyond, rank_table_file=str(table)))
    _core.check_create(AllToAllVParam(**beyond, hccl_comm=64), DeviceInfo("Ascend910B3", 1))
    with pytest.raises(InvalidParamError, match="a path that does not exist"):
        _core.check_create(AllToAllVParam(**beyond, rank_table_file=f"{table}\0x"))


def test_bfloat16_needs_a_family_that_has_it() -> None:
    """Create refuses these families already, so only the free function shows code 6."""
    param = AllToAllVParam(**BASE)
    for soc in ("Ascend310P3", "Ascend310B1", "Ascend910A", "Ascend910ProB", "Ascend910"):
        with pytest.raises(InvalidTensorError, match=soc) as caught:
            _core.infer_shape(param, [60], "bfloat16", device=DeviceInfo(soc, 8))
        assert caught.value.code == 6
    assert _core.infer_shape(param, [60], "bfloat16", device=DeviceInfo("Ascend910B3", 8)) == [1, 4]
    assert _core.infer_shape(param, [60], "float16", device=DeviceInfo("Ascend310P3", 8)) == [1, 4]


def test_infer_shape_judges_an_unchecked_param() -> None:
    """Arrays of unequal lengths must not be read beyond their ends."""
    with pytest.raises(InvalidParamError, match=r"sdispls has 1 entries, expected 2.*A2A-1054"):
        _core.infer_shape(AllToAllVParam(**(BASE | {"sdispls": [0]})), [60], "int8")


def test_exactly_256_gib_is_accepted() -> None:
    assert _core.infer_shape(AllToAllVParam(**BASE), [256, 2**28], "float32") == [1, 4]


def test_unknown_names_of_dtypes_and_formats() -> None:
    for dtype, layout in (("str", "nd"), ("float32", "rzzz")):
        with pytest.raises(InvalidTensorError, match="is not known") as caught:
            _core.TensorDesc([1], dtype, layout)
        assert caught.value.code == 13


def test_errors_survive_pickling() -> None:
    with pytest.raises(AllToAllVError) as caught:
        _core.infer_shape(AllToAllVParam(**BASE), [], "float32")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.code) == (InvalidTensorError, str(caught.value), 8)
