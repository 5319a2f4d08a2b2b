"""Parameters of the ATB-shaped quantized AllReduce, and their JSON form."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from alltoallv import _core
from alltoallv.atb.params import (
    COUNTS,
    FIELDS,
    READERS,
    AllToAllVParam,
    Reader,
    read_fields,
    read_int32,
    read_str,
    refuse_unreadable,
    with_fields,
    write_fields,
)
from alltoallv.quantization.spec import Gather, Overflow, Quantization, SumOp, coding

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
