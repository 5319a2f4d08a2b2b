"""The param in Python: fields, equality, and ATB's JSON form."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import alltoallv
from alltoallv import _core
from alltoallv.atb.params import AllToAllVParam, CommMode, QuantAllReduceParam, QuantType
from alltoallv.errors import InvalidParamError

INT32 = st.integers(-(2**31), 2**31 - 1)
ARRAY = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PARAMS = st.builds(
    AllToAllVParam,
    rank=INT32,
    rank_size=INT32,
    rank_root=INT32,
    send_counts=ARRAY,
    sdispls=ARRAY,
    recv_counts=ARRAY,
    rdispls=ARRAY,
    backend=TEXT,
    comm_mode=st.integers(-1, 3),
    rank_table_file=TEXT,
    comm_domain=TEXT,
    rsv=st.binary(max_size=64),
)
MINIMAL = '{"rank": 0, "rankSize": 2'


def test_defaults_are_those_of_atb() -> None:
    param = AllToAllVParam()
    assert (param.rank, param.rank_size, param.rank_root) == (0, 0, 0)
    assert (param.send_counts, param.sdispls, param.recv_counts, param.rdispls) == ((), (), (), ())
    assert (param.backend, param.hccl_comm, param.comm_mode) == ("hccl", 0, CommMode.MULTI_PROCESS)
    assert (param.rank_table_file, param.comm_domain, param.rsv) == ("", "", bytes(64))


def test_fields_can_be_assigned_but_not_changed_in_place() -> None:
    param = AllToAllVParam()
    param.send_counts = [1, 2]
    assert param.send_counts == (1, 2)
    with pytest.raises(AttributeError):
        param.send_counts.append(3)  # type: ignore[attr-defined]
    with pytest.raises(InvalidParamError, match=r"65 bytes, expected at most 64.*A2A-1037"):
        param.rsv = bytes(65)
    with pytest.raises(InvalidParamError, match=r"integers of 0 to 255.*A2A-1036"):
        AllToAllVParam(rsv=[256])
    for name, value, kind in (
        ("rank", "0", "int"),
        ("send_counts", 3, r"Sequence\[int\]"),
        ("comm_domain", None, "str"),
    ):
        with pytest.raises(TypeError, match=f"^{name} is {value!r}, expected {kind}$"):
            AllToAllVParam(**{name: value})


@pytest.mark.parametrize("operation", [alltoallv.AllToAllVOperation, alltoallv.QuantAllReduceOperation])
def test_what_is_no_param(operation: type[Any]) -> None:
    with pytest.raises(
        InvalidParamError, match=r"param is a NoneType, expected (AllToAllV|QuantAllReduce)Param.*A2A-1204"
    ):
        operation(None)


def test_equality_is_by_value_and_there_is_no_hash() -> None:
    assert AllToAllVParam(rank=1) == AllToAllVParam(rank=1)
    assert AllToAllVParam(rsv=[1]) != AllToAllVParam(rsv=[2])
    assert AllToAllVParam() != 3
    with pytest.raises(TypeError, match="mutable"):
        hash(AllToAllVParam())


@given(PARAMS)
def test_round_trips(param: AllToAllVParam) -> None:
    for other in (
        AllToAllVParam.from_json(param.to_json()),
        AllToAllVParam.from_json(json.loads(param.to_json())),
        pickle.loads(pickle.dumps(param)),
        copy.deepcopy(param),
    ):
        assert other == param
        assert type(other) is AllToAllVParam
        assert repr(other) == repr(param)


def test_keys_are_those_of_atb() -> None:
    param = AllToAllVParam(rank=1, rank_size=2, send_counts=[3], hccl_comm=2**48, comm_mode=1, rsv=[0, 7])
    assert json.loads(param.to_json()) == {
        "rank": 1,
        "rankSize": 2,
        "rankRoot": 0,
        "sendCounts": [3],
        "sdispls": [],
        "recvCounts": [],
        "rdispls": [],
        "backend": "hccl",
        "hcclComm": 2**48,
        "commMode": 1,
        "rankTableFile": "",
        "commDomain": "",
        "rsv": [0, 7],
    }


def test_hccl_comm_is_not_read_and_unknown_keys_are_ignored() -> None:
    param = AllToAllVParam.from_json(MINIMAL + ', "hcclComm": 4096, "send_counts": "x", "color": null}')
    assert param == AllToAllVParam(rank_size=2)


def test_integers_above_int64_wrap_so_that_create_refuses_them() -> None:
    param = AllToAllVParam.from_json(
        MINIMAL + f', "sendCounts": [{2**63}, {2**64 - 1}], "sdispls": [0, 0], "recvCounts": [0, 0],'
        ' "rdispls": [0, 0]}'
    )
    assert param.send_counts == (-(2**63), -1)
    with pytest.raises(InvalidParamError, match=r"send_counts\[0\] is -9223372036854775808.*A2A-1079"):
        _core.check_create(param)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rankSize": 2}', "rank is missing"),
        ('{"rank": 2}', "rankSize is missing"),
        ("[1, 2]", "holds a list, expected an object"),
        ("", r"line 1 column 1 \(character 0\)"),
        ('{"rank": 0,\n "rankSize": }', r"line 2 column 14 \(character 25\)"),
        (MINIMAL, r"line 1 column 26 \(character 25\)"),
        (b'\xff{"rank": 0}', "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"rank": ' + "1" * 5000 + ', "rankSize": 2}', "not JSON|expected an integer of"),
        ('{"rank": true, "rankSize": 2}', "rank is True, expected an integer"),
        ('{"rank": 0, "rankSize": 2.0}', "rankSize is 2.0, expected an integer"),
        ('{"rank": 0, "rankSize": null}', "rankSize is None, expected an integer"),
        ('{"rank": 0, "rankSize": 2147483648}', "rankSize is 2147483648, expected an integer of"),
        (MINIMAL + ', "commMode": "0"}', "commMode is '0', expected an integer"),
        (MINIMAL + ', "rankRoot": NaN}', "rankRoot is nan, expected an integer"),
        (MINIMAL + ', "backend": 1}', "backend is 1, expected a string"),
        (MINIMAL + ', "commDomain": ["0"]}', "commDomain is .*, expected a string"),
        (MINIMAL + ', "sendCounts": 3}', "sendCounts is 3, expected a list"),
        (MINIMAL + ', "sendCounts": "12"}', "sendCounts is '12', expected a list"),
        (MINIMAL + ', "rdispls": [0, false]}', r"rdispls\[1\] is False, expected an integer"),
        (MINIMAL + ', "rdispls": [1e3]}', r"rdispls\[0\] is 1000.0, expected an integer"),
        (MINIMAL + f', "sdispls": [{2**64}]}}', r"sdispls\[0\] is 18446744073709551616"),
        (MINIMAL + f', "sdispls": [{-(2**63) - 1}]}}', r"sdispls\[0\] is -9223372036854775809"),
        (MINIMAL + ', "rsv": [256]}', r"rsv\[0\] is 256, expected an integer of 0 to 255"),
        (MINIMAL + f', "rsv": {[0] * 65}}}', "rsv has 65 entries, expected at most 64"),
    ],
)
def test_json_that_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidParamError, match=message) as caught:
        AllToAllVParam.from_json(text)
    assert caught.value.code == 1


def test_values_are_left_to_create() -> None:
    param = AllToAllVParam.from_json(MINIMAL + ', "backend": "lccl", "commMode": 5}')
    assert (param.backend, param.comm_mode) == ("lccl", 5)


@pytest.mark.parametrize(
    ("kind", "wrong", "meant"),
    [(AllToAllVParam, "sendCounts", "send_counts"), (QuantAllReduceParam, "groupSize", "group_size")],
)
def test_a_name_that_is_no_field(kind: type[Any], wrong: str, meant: str) -> None:
    param = kind()
    text = f"^{kind.__name__} has no field '{wrong}': did you mean '{meant}'\\?$"
    with pytest.raises(AttributeError, match=text):
        setattr(param, wrong, [1])
    with pytest.raises(AttributeError, match=text):
        getattr(param, wrong)
    with pytest.raises(TypeError, match=text):
        kind(**{wrong: [1]})
    with pytest.raises(AttributeError, match="has no field 'xyz': expected one of rank, rank_size"):
        param.xyz = 1
    assert param == kind()


def test_repr_and_signature() -> None:
    param = AllToAllVParam(rank=1, rank_size=2, send_counts=[3, 4], comm_mode=1, rsv=[1])
    assert repr(AllToAllVParam(rank_size=2, recv_counts=[1])) == "AllToAllVParam(rank_size=2, recv_counts=(1,))"
    quantized = QuantAllReduceParam(rank=1, quant_type=QuantType.DYNAMIC, bits=4)
    assert repr(quantized) == "QuantAllReduceParam(rank=1, quant_type=QuantType.DYNAMIC, bits=4)"
    for each in (param, quantized):
        assert eval(repr(each)) == each
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each
    for kind, last in ((AllToAllVParam, "rsv"), (QuantAllReduceParam, "overflow")):
        names = list(inspect.signature(kind).parameters)
        assert (names[0], names[1], names[-1]) == ("rank", "rank_size", last)
    with pytest.raises(TypeError, match="positional"):
        AllToAllVParam(1)  # type: ignore[misc]
