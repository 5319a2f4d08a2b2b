"""What AllToAllVOperation accepts and refuses: at which stage, and with which of ATB's codes.

A row changes the base case: rank 0 of 2, an input of 60 elements, two elements to and from each rank.
``stage`` is where the first error appears: C (create), I (infer shape), S (setup), or "-" for none; these
are also run with data on real ranks. ``atb`` describes what ATB does where ours differs (docs/compatibility.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alltoallv import _core
from alltoallv.atb.params import AllToAllVParam, CommMode, DeviceInfo

INT64_MAX = 2**63 - 1
BASE: dict[str, Any] = {
    "rank": 0,
    "rank_size": 2,
    "send_counts": [2, 2],
    "sdispls": [0, 2],
    "recv_counts": [2, 2],
    "rdispls": [0, 2],
}
ALONE: dict[str, Any] = {"rank_size": 1, "send_counts": [4], "sdispls": [1], "recv_counts": [4], "rdispls": [0]}
ATB_DTYPES = ("float16", "float32", "int8", "int16", "int32", "int64", "bfloat16")
OTHER_DTYPES = ("uint8", "uint16", "uint32", "uint64", "float64", "complex64", "float8_e4m3fn")
A2 = DeviceInfo("Ascend910B3", 8)
Desc = tuple[tuple[int, ...], str, str]


@dataclass(frozen=True)
class Row:
    """One case; see the module's docstring."""

    id: str
    stage: str
    code: int
    why: str
    param: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)  # what differs on rank 1 when the row is run
    shape: tuple[int, ...] = (3, 4, 5)
    dtype: str = "float32"
    format: str = "nd"
    output: Desc | None = None  # what the caller gives to setup; None: what infer_shape says
    device: DeviceInfo | None = None
    atb: str = ""

    def make_param(self, **changes: Any) -> AllToAllVParam:
        return AllToAllVParam(**(BASE | self.param | changes))

    def input(self) -> _core.TensorDesc:
        return _core.TensorDesc(self.shape, self.dtype, self.format)


def acceptance() -> Iterator[Row]:
    """The facts of ATB's 24 acceptance rows."""
    for dtype in ATB_DTYPES:
        yield Row(f"dtype-{dtype}", "-", 0, "one of the seven dtypes", dtype=dtype)
    yield Row("send-counts-3-of-2", "C", 1, "one entry too many", {"send_counts": [1, 1, 1]})
    for name in ("sdispls", "recv_counts", "rdispls"):
        yield Row(f"{name}-3-of-2", "C", 1, "one entry too many", {name: [1, 1, 1]})
    yield Row("recv-sum-overflow", "I", 1, "sum exceeds 64 bits", {"recv_counts": [3, INT64_MAX]})
    yield Row("recv-sum-0", "I", 1, "the output would be empty", {"recv_counts": [0, 0]})
    yield Row("send-beyond-input", "I", 1, "the input has 60", {"send_counts": [70, 70], "sdispls": [0, 70]})
    yield Row("recv-beyond-sum", "I", 1, "3 + 2 > 4", {"rdispls": [0, 3]})
    yield Row("dtype-bool", "I", 13, "not one of the seven", dtype="bool")
    yield Row("format-nhwc", "I", 13, "only nd", format="nhwc")
    for name in ("send_counts", "sdispls", "recv_counts", "rdispls"):
        yield Row(f"{name}-negative", "C", 1, "less than 0", {name: [1, -1]})
    yield Row("sdispls-max", "I", 1, "displacement plus count overflows", {"sdispls": [0, INT64_MAX]})
    yield Row("rdispls-max", "I", 1, "displacement plus count overflows", {"rdispls": [0, INT64_MAX]})
    for soc in ("Ascend310P3", "Ascend310P"):
        yield Row(f"soc-{soc}", "C", 1, "not of the A2 or A3 family", device=DeviceInfo(soc, 8))
    yield Row("rsv-1", "C", 1, "a reserved byte is set", {"rsv": [1]})


def create() -> Iterator[Row]:
    """Create checks, corrected where ATB's own boundary tables are older than its code."""
    yield Row("rsv-last", "C", 1, "the 64th reserved byte is set", {"rsv": [0] * 63 + [255]})
    for backend in ("lccl", "HCCL", "asa", ""):
        yield Row(f"backend-{backend}", "C", 1, "not a backend's name", {"backend": backend})
    for backend in ("shm", "gloo", "nccl", "mpi", "auto"):
        yield Row(f"backend-{backend}", "-", 0, "ours", {"backend": backend}, atb="C:1, only hccl")
    for soc in ("Ascend910B1", "Ascend910B4", "Ascend910_9391"):
        yield Row(f"soc-{soc}", "-", 0, "A2 or A3", device=DeviceInfo(soc, 2))
    for soc in ("Ascend910B", "Ascend910A", "Ascend310B1", ""):
        yield Row(f"soc-{soc}", "C", 1, "neither A2 nor A3", device=DeviceInfo(soc, 2))
    for mode in (CommMode.UNDEFINED, 2, 7):
        yield Row(f"comm-mode-{int(mode)}", "C", 1, "neither 0 nor 1", {"comm_mode": mode})
    yield Row("domain-128", "-", 0, "128 bytes are allowed", {"comm_domain": "d" * 128})
    yield Row("domain-129", "C", 1, "one byte too many", {"comm_domain": "d" * 129})
    yield Row("domain-128-utf8", "C", 1, "129 bytes in 43 characters", {"comm_domain": "域" * 43})
    for domain in ("0:400", "ep:200", ":200", "a:b:300"):
        yield Row(f"domain-{domain}", "-", 0, "a size of at least 200 MB", {"comm_domain": domain})
    ignored = "no error, the size is not read for hccl"
    for domain in ("0:199", "0:", "0:x", "0:-400", "0:+400", "0: 400", "0:4e2", "0:400MB", f"0:{2**63}"):
        yield Row(f"domain-{domain}", "C", 1, "no size, or below 200", {"comm_domain": domain}, atb=ignored)
    yield Row("rank-3-of-2", "C", 1, "rank >= rank_size", {"rank": 3})
    yield Row("rank-negative", "C", 1, "rank < 0", {"rank": -1})
    yield Row("rank-root-3-of-2", "C", 1, "rank_root >= rank_size", {"rank_root": 3})
    yield Row("rank-root-negative", "C", 1, "rank_root < 0", {"rank_root": -1})
    yield Row("rank-root-1", "-", 0, "any rank may be the root", {"rank_root": 1})
    yield Row("rank-size-0", "C", 1, "no rank at all", {"rank_size": 0})
    yield Row("rank-size-negative", "C", 1, "rank_size < 0", {"rank_size": -2})
    many = {name: [0] * 80 for name in ("send_counts", "sdispls", "recv_counts", "rdispls")}
    yield Row("rank-size-80-of-8", "C", 1, "more ranks than devices", {"rank_size": 80} | many, device=A2)
    yield Row("device-count-unknown", "C", 1, "the query failed", device=DeviceInfo("Ascend910B3", -1))
    yield Row("table-missing", "C", 1, "no such file", {"rank_table_file": "/nonexistent/ranks.json"})
    yield Row("lengths-0-of-2", "C", 1, "empty arrays", {name: [] for name in many})
    yield Row("min-int64", "C", 1, "the smallest number", {"recv_counts": [-(2**63), 2]})


def tensors() -> Iterator[Row]:
    """Infer shape and setup, corrected likewise."""
    for dtype in OTHER_DTYPES:
        yield Row(f"dtype-{dtype}", "I", 13, "not one of the seven", dtype=dtype)
    for layout in ("nchw", "fractal_nz"):
        yield Row(f"format-{layout}", "I", 13, "only nd", format=layout)
    yield Row("dims-0", "I", 8, "fewer than 1 dimension", shape=())
    yield Row("dims-9", "I", 8, "more than 8 dimensions", shape=(60,) + (1,) * 8)
    yield Row("dims-8", "-", 0, "8 dimensions are allowed", shape=(60,) + (1,) * 7)
    yield Row("size-0", "I", 9, "an empty input", shape=(3, 0, 5))
    yield Row("size-negative", "I", 9, "a negative dimension", shape=(-3, -4, 5))
    yield Row("size-overflow", "I", 9, "bytes exceed 64 bits", shape=(2**31, 2**31, 4))
    yield Row("size-257-GiB", "I", 9, "more than 256 GiB", shape=(257, 2**28))
    yield Row("dims-before-dtype", "I", 8, "shape is judged first", shape=(), dtype="bool")
    yield Row("size-before-dtype", "I", 9, "size is judged first", shape=(0,), dtype="bool")
    yield Row("dtype-before-counts", "I", 13, "dtype first", {"recv_counts": [0, 0]}, dtype="bool")
    yield Row(
        "zero-counts",
        "-",
        0,
        "zero is ordinary; ATB's text wants > 0, its code does not",
        {"send_counts": [0, 3], "sdispls": [60, 57], "recv_counts": [0, 2], "rdispls": [2, 0]},
        {"send_counts": [2, 0], "sdispls": [0, 0], "recv_counts": [3, 0], "rdispls": [0, 0]},
    )
    yield Row("send-zero-outside", "I", 1, "ATB's rule", {"send_counts": [2, 0], "sdispls": [0, 61]})
    zero_outside = {"recv_counts": [2, 0], "rdispls": [0, 3]}
    yield Row("recv-zero-outside", "I", 1, "ATB's rule", zero_outside)
    yield Row("permuted", "-", 0, "any order of regions", {"rdispls": [2, 0], "sdispls": [58, 7]})
    yield Row("send-overlap", "-", 0, "the same elements to both", {"sdispls": [1, 1]})
    yield Row("send-sum-beyond", "-", 0, "only each region is bounded", {
        "send_counts": [60, 60], "sdispls": [0, 0], "recv_counts": [60, 60], "rdispls": [0, 60]
    })  # fmt: skip
    yield Row("recv-overlap", "I", 1, "both write element 2", {"rdispls": [1, 2]}, atb="no error")
    yield Row("recv-equal", "I", 1, "both write 0 and 1", {"rdispls": [0, 0]}, atb="no error")
    huge = {"recv_counts": [INT64_MAX - 2, 2], "rdispls": [0, INT64_MAX - 2]}
    yield Row("recv-sum-max", "S", 9, "fits 64 bits, but no memory", huge)
    yield Row("alone", "-", 0, "one rank, and its displacement counts", ALONE)
    wrong = "no error, setup does not look"
    yield Row("out-too-long", "S", 8, "not sum(recv_counts)", output=((1, 5), "float32", "nd"), atb=wrong)
    yield Row("out-flat", "S", 8, "one dimension", output=((4,), "float32", "nd"), atb=wrong)
    yield Row("out-turned", "S", 8, "[4, 1]", output=((4, 1), "float32", "nd"), atb=wrong)
    yield Row("out-dims-9", "S", 8, "9 dimensions", output=((1,) * 8 + (4,), "float32", "nd"))
    yield Row("out-empty", "S", 9, "no element", output=((1, 0), "float32", "nd"))
    yield Row("out-dtype", "S", 13, "not the input's", output=((1, 4), "int32", "nd"))
    yield Row("out-bool", "S", 13, "not one of the seven", output=((1, 4), "bool", "nd"))
    yield Row("out-format", "S", 13, "only nd", output=((1, 4), "float32", "nhwc"))


ROWS = [*acceptance(), *create(), *tensors()]
