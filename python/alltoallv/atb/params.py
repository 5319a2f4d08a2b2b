"""Parameters of the ATB-shaped operators, and their JSON form."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from alltoallv import _core
from alltoallv._core import CommMode, DeviceInfo
from alltoallv.errors import InvalidParamError
from alltoallv.launch.variables import utf8
from alltoallv.quantization.spec import Gather, Overflow, Quantization, SumOp, coding

__all__ = ["AllToAllVParam", "CommMode", "DeviceInfo"]


CommMode.__module__ = "alltoallv"  # where users find it


C = TypeVar("C", bound=type[Any])


def with_fields(cls: C) -> C:
    """Makes a param class refuse names that are no fields, in the constructor and as attributes.

    It also gives the class a short repr.
    """
    init: Any = cls.__init__
    fields = {name: field.annotation for name, field in inspect.signature(cls).parameters.items()}

    def unknown(name: str) -> str:
        meant = difflib.get_close_matches(name, fields, 1)
        return f"{cls.__name__} has no field {name!r}: " + (
            f"did you mean {meant[0]!r}?" if meant else f"expected one of {', '.join(fields)}"
        )

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in fields:
                raise TypeError(unknown(name))
        try:
            init(self, *args, **values)
        except TypeError:
            refuse_unreadable(values)
            raise

    def assign(self: Any, name: str, value: object) -> None:
        if name not in fields:
            raise AttributeError(unknown(name))
        try:
            object.__setattr__(self, name, value)
        except TypeError:
            refuse_unreadable({name: value})
            raise TypeError(f"{name} is {value!r}, expected {fields[name]}") from None

    def missing(self: Any, name: str) -> Any:
        raise AttributeError(unknown(name))

    def represent(self: Any) -> str:
        plain, parts = cls(), []
        for name in fields:
            if (value := getattr(self, name)) != getattr(plain, name):
                shown = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
                parts.append(f"{name}={shown}")
        return f"{cls.__name__}({', '.join(parts)})"

    methods = {"__init__": checked, "__setattr__": assign, "__getattr__": missing, "__repr__": represent}
    for name, method in methods.items():
        setattr(cls, name, method)
    return cls


def refuse_unreadable(fields: Mapping[str, Any]) -> None:
    """Raises for values of the right type that the core cannot take: too large numbers, text that is no UTF-8."""
    for name, value in fields.items():
        several = isinstance(value, list | tuple)
        for entry in value if several else (value,):
            bits = 64 if several or name == "hccl_comm" else 32
            if isinstance(entry, int) and not -(2 ** (bits - 1)) <= entry < 2 ** (bits - 1):
                raise InvalidParamError(
                    f"{name} {'holds' if several else 'is'} {entry}, which does not fit into {bits} bits", id=1211
                )
            if isinstance(entry, str):
                utf8(name, entry)


@with_fields
class AllToAllVParam(_core.AllToAllVParam):
    """Parameters of `AllToAllVOperation`, with ATB's fields in snake_case.

    The constructor takes every field as a keyword and checks types only; values are checked where the
    operation is created. The four arrays have one entry per rank, in elements of the tensor, and are read as
    tuples: assign a new sequence to change one.

    Attributes:
        rank (int): this rank.
        rank_size (int): the number of ranks.
        rank_root (int): the rank that the others meet at.
        send_counts (tuple[int, ...]): to rank j goes ``x.flat[sdispls[j] : sdispls[j] + send_counts[j]]``.
        sdispls (tuple[int, ...]): where what goes to each rank begins.
        recv_counts (tuple[int, ...]): from rank j comes ``y.flat[rdispls[j] : rdispls[j] + recv_counts[j]]``.
        rdispls (tuple[int, ...]): where what comes from each rank begins.
        backend: ``"hccl"`` (the native transport of the tensors' device), or shm, gloo, nccl, mpi, auto.
        hccl_comm: address of an HcclComm that the caller owns, or 0.
        comm_mode: a `CommMode`; any other number is refused where the operation is created.
        rank_table_file: path of a rank table, or empty.
        comm_domain: ``"name"`` or ``"name:MB"``, at most 128 bytes.
        rsv: 64 reserved bytes, all zero.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        rank: int = 0,
        rank_size: int = 0,
        rank_root: int = 0,
        send_counts: Sequence[int] = (),
        sdispls: Sequence[int] = (),
        recv_counts: Sequence[int] = (),
        rdispls: Sequence[int] = (),
        backend: str = "hccl",
        hccl_comm: int = 0,
        comm_mode: int = CommMode.MULTI_PROCESS,
        rank_table_file: str = "",
        comm_domain: str = "",
        rsv: bytes | Sequence[int] = b"",
    ) -> None:
        fields = {name: value for name, value in locals().items() if name in FIELDS}
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> AllToAllVParam:
        """Reads ATB's JSON form: camelCase keys, ``rank`` and ``rankSize`` mandatory, unknown keys ignored.

        ``hcclComm`` is not read. As in ATB a 64-bit integer above INT64_MAX wraps negative, so that creating
        the operation refuses it.

        Args:
            data: JSON text, or the object that it holds.

        Raises:
            InvalidParamError: text that is not JSON (with the position), a missing key, or a value of a wrong
                type.
        """
        return cls(**read_fields(data, READERS))

    def to_json(self) -> str:
        """Returns ATB's JSON form, every key; ``hcclComm`` as an integer, ``rsv`` without trailing zeros."""
        return write_fields({name: getattr(self, name) for name in FIELDS})

    def __reduce__(self) -> tuple[Callable[[], AllToAllVParam], tuple[()]]:
        return functools.partial(AllToAllVParam, **{name: getattr(self, name) for name in FIELDS}), ()


FIELDS = tuple(inspect.signature(AllToAllVParam).parameters)
COUNTS = ("send_counts", "sdispls", "recv_counts", "rdispls")

Reader = Callable[[str, object], Any]  # gets a key and its value


def read_fields(data: str | bytes | Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Returns the fields that have readers and that a param's JSON form gives; ATB demands rank and rankSize."""
    members = data if isinstance(data, Mapping) else _parse_object(data)
    for key in ("rank", "rankSize"):
        if key not in members:
            raise InvalidParamError(f"{key} is missing, expected an integer", id=1212)
    keys = {name: _json_key(name) for name in readers}
    return {name: readers[name](key, members[key]) for name, key in keys.items() if key in members}


def write_fields(fields: Mapping[str, Any]) -> str:
    """Returns the JSON form of a param's fields."""
    members = {_json_key(name): value for name, value in fields.items()}
    members["commMode"], members["rsv"] = int(fields["comm_mode"]), list(fields["rsv"].rstrip(b"\0"))
    return json.dumps(members)


def _json_key(name: str) -> str:
    """Returns ATB's name of a field: the same words in camelCase."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _parse_object(text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (character {error.pos})"
        raise InvalidParamError(f"the text is not JSON: {error.msg} at {where}", id=1213) from None
    except (ValueError, RecursionError) as error:
        raise InvalidParamError(f"the text is not JSON that can be read: {error}", id=1214) from None
    if not isinstance(value, dict):
        raise InvalidParamError(f"the JSON text holds a {type(value).__name__}, expected an object", id=1215)
    return value


def read_int(key: str, value: object, low: int, high: int) -> int:
    """Returns an integer of ``low`` to ``high``; raises InvalidParamError for others and for a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParamError(f"{key} is {value!r}, expected an integer", id=1216)
    if not low <= value <= high:
        raise InvalidParamError(f"{key} is {value}, expected an integer of {low} to {high}", id=1217)
    return value


def read_int32(key: str, value: object) -> int:
    return read_int(key, value, -(2**31), 2**31 - 1)


def read_str(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidParamError(f"{key} is {value!r}, expected a string", id=1218)
    return utf8(key, value)


def read_list(key: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidParamError(f"{key} is {value!r}, expected a list of integers", id=1219)
    return list(value)


def read_int64_list(key: str, value: object) -> list[int]:
    """Returns 64-bit integers, signed or not, as signed ones."""
    entries = enumerate(read_list(key, value))
    wide = [read_int(f"{key}[{index}]", entry, -(2**63), 2**64 - 1) for index, entry in entries]
    return [entry - 2**64 if entry >= 2**63 else entry for entry in wide]


def read_bytes(key: str, value: object) -> bytes:
    entries = read_list(key, value)
    if len(entries) > 64:
        raise InvalidParamError(f"{key} has {len(entries)} entries, expected at most 64", id=1220)
    return bytes(read_int(f"{key}[{index}]", entry, 0, 255) for index, entry in enumerate(entries))


READERS: dict[str, Reader] = {
    **dict.fromkeys(("rank", "rank_size", "rank_root", "comm_mode"), read_int32),
    **dict.fromkeys(COUNTS, read_int64_list),
    **dict.fromkeys(("backend", "rank_table_file", "comm_domain"), read_str),
    "rsv": read_bytes,
}


_GROUP = tuple(name for name in FIELDS if name not in COUNTS)
_DYNAMIC = ("bits", "group_size", "gather", "overflow")  # not in ATB
_READERS: dict[str, Reader] = {
    **{name: read for name, read in READERS.items() if name in _GROUP},
    **dict.fromkeys(("quant_type", "out_data_type", "bits", "group_size"), read_int32),
    **dict.fromkeys(("all_reduce_type", "gather", "overflow"), read_str),
}


class QuantType(enum.IntEnum):
    """Describes how many values ``scale`` has, by ATB's numbers.

    DYNAMIC is this package's own number: every rank finds its scales, one per group.
    """

    UNQUANT = 0
    PER_TENSOR = 1
    PER_CHANNEL = 2
    MAX = 3
    DYNAMIC = 16


@with_fields
@dataclass(slots=True, repr=False)
class QuantAllReduceParam:
    """Parameters of `QuantAllReduceOperation`: the fields of ATB's AllReduceParam in snake_case, and of DYNAMIC.

    Values are checked where the operation is created.

    Attributes:
        rank: this rank.
        rank_size: the number of ranks.
        rank_root: the rank that the others meet at.
        all_reduce_type: ``"sum"``; with DYNAMIC also ``"avg"``.
        backend: ``"lccl"``, the only one of ATB's that quantizes; on a CPU the same as ``"shm"`` and ``"auto"``.
        hccl_comm: address of an HcclComm that the caller owns, or 0.
        comm_mode: a `CommMode`, or its number.
        rank_table_file: path of a rank table, or empty.
        comm_domain: ``"name"`` or ``"name:MB"``, at most 128 bytes.
        quant_type: a `QuantType`, or its number: PER_TENSOR, PER_CHANNEL or DYNAMIC.
        out_data_type: ACL's number of float16, 1; with DYNAMIC also of float32, 0, or bfloat16, 27. -1, the default:
            float16, with DYNAMIC the input's.
        rsv: 64 reserved bytes, all zero.
        bits: with DYNAMIC, as the next three, an argument of `alltoallv.numpy.quantized_all_reduce`.
        group_size: elements per scale.
        gather: how the sum travels.
        overflow: what becomes of values that do not fit.
    """

    rank: int = 0
    rank_size: int = 0
    rank_root: int = 0
    all_reduce_type: str = "sum"
    backend: str = "lccl"
    hccl_comm: int = 0
    comm_mode: int = 0
    rank_table_file: str = ""
    comm_domain: str = ""
    quant_type: int = QuantType.PER_TENSOR
    out_data_type: int = -1
    rsv: bytes = b""
    bits: int = 8
    group_size: int = 128
    gather: Gather = "full"
    overflow: Overflow = "saturate"

    @property
    def quantization(self) -> Quantization:
        """Returns the options of the dynamic mode, checked."""
        op: SumOp = "avg" if self.all_reduce_type == "avg" else "sum"
        return Quantization.checked(coding(self.bits, None), self.group_size, self.gather, op, self.overflow)

    def group(self) -> AllToAllVParam:
        """Returns what the param says of the ranks, without counts."""
        return AllToAllVParam(**{name: getattr(self, name) for name in _GROUP})

    def core(self) -> _core.QuantAllReduceParam:
        """Returns the core's param.

        Raises:
            InvalidParamError: ``bits``, ``group_size``, ``gather`` or ``overflow`` has no meaning.
        """
        quantization = self.quantization
        refuse_unreadable({name: getattr(self, name) for name in ("all_reduce_type", "quant_type", "out_data_type")})
        return _core.QuantAllReduceParam(
            self.group(),
            self.all_reduce_type,
            int(self.quant_type),
            self.out_data_type,
            quantization.format,
            quantization.group_size,
            quantization.gather == "quantized",
            quantization.overflow,
        )

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> QuantAllReduceParam:
        """Reads ATB's JSON form: camelCase keys, ``rank`` and ``rankSize`` mandatory, unknown keys ignored.

        Raises:
            InvalidParamError: text that is not JSON, a missing key, or a value of a wrong type.
        """
        return cls(**read_fields(data, _READERS))

    def to_json(self) -> str:
        """Returns ATB's JSON form, every key, and with DYNAMIC its own; ``rsv`` without trailing zeros."""
        fields = asdict(self) | {"quant_type": int(self.quant_type)}
        if self.quant_type != QuantType.DYNAMIC:
            fields = {name: value for name, value in fields.items() if name not in _DYNAMIC}
            if self.out_data_type == -1:
                fields["out_data_type"] = 1  # ATB has no default here
        return write_fields(fields)
