"""Holds what the devices' documentation demands of operators that communicate; the emulator keeps to it.

``ALLTOALLV_NPU_PRODUCT`` names which product: A3 (the default), A2 or, for the operators that only it has, 950.
``ALLTOALLV_NPU_LIMITS=relax`` lifts the limits, for sizes that suit a laptop. This module needs no torch:
``python -m alltoallv plan --moe`` asks it as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, cast, get_args

from alltoallv.errors import InvalidParamError
from alltoallv.launch.variables import integer

Product = Literal["A2", "A3", "950"]
_MB = 1 << 20
_RELAX = "ALLTOALLV_NPU_LIMITS=relax lifts the limits of the device"


def product() -> Product:
    """Returns the product whose limits are checked.

    Raises:
        InvalidParamError: ``ALLTOALLV_NPU_PRODUCT`` is none of A2, A3 and 950.
    """
    value = os.environ.get("ALLTOALLV_NPU_PRODUCT") or "A3"
    for known in get_args(Product):
        if value == known:
            return cast(Product, known)
    raise InvalidParamError(f"ALLTOALLV_NPU_PRODUCT is {value!r}, expected A2, A3 or 950", id=1409)


def buffer_mb() -> int:
    """Returns HCCL_BUFFSIZE: the megabytes of a communicator's buffer, 200 where it is not set."""
    return integer(os.environ, "HCCL_BUFFSIZE", 200) if os.environ.get("HCCL_BUFFSIZE") else 200


def check(breaches: Callable[[Product], Iterable[str]], products: tuple[Product, ...] = ("A2", "A3")) -> None:
    """Raises InvalidParamError with the first limit that the call breaks on this process's product.

    The limits of ``products`` are known; an operator that is called on another one is refused as well.
    """
    value = os.environ.get("ALLTOALLV_NPU_LIMITS") or "keep"
    if value not in ("keep", "relax"):
        raise InvalidParamError(f"ALLTOALLV_NPU_LIMITS is {value!r}, expected keep or relax", id=1410)
    if value == "keep":
        if product() not in products:
            wanted = f"{' or '.join(products)}, whose limits are known for this operator"
            raise InvalidParamError(f"ALLTOALLV_NPU_PRODUCT is {product()}, expected {wanted} ({_RELAX})", id=1489)
        for breach in breaches(product()):
            raise InvalidParamError(f"{breach} ({_RELAX})", id=1480)


def check_dtype(name: str, dtype: object, allowed: tuple[str, ...] = ("float16", "bfloat16")) -> None:
    """Raises InvalidParamError unless the product has the operator for an argument ``name`` of that dtype of torch."""
    own_dtype = str(dtype).removeprefix("torch.")
    wrong = f"{name} has dtype {own_dtype}, expected {' or '.join(allowed)}"
    check(lambda product: [] if own_dtype in allowed else [f"{wrong} on {product}"])


def _outside(name: str, value: int, low: int, high: int, product: str) -> Iterable[str]:
    if not low <= value <= high:
        yield f"{name} is {value}, expected {low} to {high} on {product}"


def _not_among(name: str, value: int, allowed: Iterable[int], product: str) -> Iterable[str]:
    if value not in allowed:
        yield f"{name} is {value}, expected one of {', '.join(map(str, allowed))} on {product}"


class MoE(NamedTuple):
    """The sizes of a call of npu_moe_distribute_dispatch or combine."""

    world: int  # ranks of the expert-parallel group
    experts: int  # of all ranks
    hidden: int  # elements of a token
    tokens: int  # of the rank that has the most
    k: int  # experts of a token
    algorithm: str = ""  # comm_alg
    shared: int = 1  # shared_expert_num, which the buffer's formula counts even where no rank has one
    shared_ranks: int = 0  # shared_expert_rank_num
    version: int = 2  # of the operator

    @property
    def local(self) -> int:
        """Experts of a rank that has no shared one."""
        return self.experts // (self.world - self.shared_ranks)

    def buffer_mb(self, product: Product) -> int:
        """Returns the smallest HCCL_BUFFSIZE, in megabytes, that the call needs."""
        if product == "A2" and self.algorithm == "hierarchy":
            needed = self.experts * self.tokens * (2 * self.hidden + 16 * _round_up(self.k, 8)) + 104 * _MB
        elif product == "A2":
            needed = 2 * (self.tokens * self.world * min(self.local, self.k) * 2 * self.hidden + 2 * _MB)
        else:
            token = _round_up(2 * self.hidden, 32) + 64
            token = -(-token // 480) * 512 if self.algorithm == "fullmesh_v2" else _round_up(token, 512)
            received = self.local * self.tokens * self.world * token
            needed = 2 * (received + (self.k + self.shared) * self.tokens * _round_up(2 * self.hidden, 512))
        return max(2, -(-needed // _MB))

    def breaches(self, product: Product) -> Iterable[str]:
        """Yields one sentence for each limit of the product that the call breaks."""
        hierarchy = product == "A2" and self.algorithm == "hierarchy"
        algorithms = ("", "fullmesh", "hierarchy") if product == "A2" else ("", "fullmesh_v1", "fullmesh_v2")
        if self.algorithm not in algorithms:
            yield f"comm_alg is {self.algorithm!r}, expected one of {algorithms} on {product}"
        if product == "A3":
            yield from _outside("ep_world_size", self.world, 2, 768, product)
            if self.version == 1:
                yield from _not_among("the hidden size", self.hidden, (7168,), product)
            else:
                yield from _outside("the hidden size", self.hidden, 1024, 8192, product)
        else:
            sizes = (16, 32, 64) if hierarchy else (*range(2, 9), 16, 32, 64, 128, 256)
            yield from _not_among("ep_world_size", self.world, sizes, product)
            yield from _outside("the hidden size", self.hidden, 32, 10240 if hierarchy else 7168, product)
            if self.hidden % 32:
                yield f"the hidden size is {self.hidden}, expected a multiple of 32 on {product}"
            if not hierarchy and self.local > 24:
                yield f"moe_expert_num is {self.experts}, {self.local} for each rank, expected 24 at most on {product}"
        most = 0 if product == "A2" else self.world - 1
        yield from _outside("shared_expert_rank_num", self.shared_ranks, 0, most, product)
        yield from _outside("shared_expert_num", self.shared, 0, 4 if self.version == 2 else 1, product)
        if self.version == 1 and self.shared_ranks and self.world % self.shared_ranks:
            yield f"shared_expert_rank_num is {self.shared_ranks}, expected a divisor of {self.world} on {product}"
        yield from _outside("moe_expert_num", self.experts, 1, 1024, product)
        yield from _outside("the number of tokens", self.tokens, 1, 256 if product == "A2" else 512, product)
        yield from _outside("the number of experts of a token", self.k, 1, 8 if self.version == 1 else 16, product)
        needed, there = self.buffer_mb(product), buffer_mb()
        if needed > there:
            yield f"HCCL_BUFFSIZE is {there} MB, expected {needed} at least on {product}: set HCCL_BUFFSIZE={needed}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class GroupedMatmul(NamedTuple):
    """The sizes of a call of npu_alltoallv_gmm or npu_gmm_alltoallv."""

    world: int
    local: int  # experts of a rank
    hidden: int  # H1, elements of a row that is multiplied
    columns: int  # N1, of the product
    nbytes: int  # that this rank sends

    def breaches(self, product: Product) -> Iterable[str]:
        """Yields one sentence for each limit of the product that the call breaks."""
        if product == "A2":
            yield "npu_alltoallv_gmm and npu_gmm_alltoallv do not exist on A2, expected A3"
        yield from _not_among("ep_world_size", self.world, (8, 16, 32, 64, 128), "A3")
        yield from _outside("the number of experts of a rank", self.local, 1, 32, "A3")
        yield from _outside("the number of experts of all ranks", self.local * self.world, 1, 256, "A3")
        yield from _outside("the first matrix's width", self.hidden, 1, 65535, "A3")
        yield from _outside("the second matrix's width", self.columns, 1, 65535, "A3")
        yield from _outside("the number of bytes that a rank sends", self.nbytes, 2 * _MB, 100 * _MB, "A3")


class Matmul(NamedTuple):
    """The sizes of a matrix product with a collective of tensor parallelism."""

    operator: str
    world: int
    inner: int  # k, the first matrix's width

    def breaches(self, product: Product) -> Iterable[str]:
        """Yields one sentence for each limit of the product that the call breaks."""
        if self.operator == "npu_mm_all_reduce_base":
            if product == "A3":
                yield f"{self.operator} does not exist on A3, expected A2: set ALLTOALLV_NPU_PRODUCT=A2"
            yield from _not_among("the world size", self.world, (1, 2, 4, 8), "A2")
            yield from _outside("the first matrix's width", self.inner, 1, 65535, "A2")
        elif "all_to_all" in self.operator:
            yield from _not_among("world_size", self.world, (2, 4, 8, 16), product)
        else:
            yield from _not_among(
                "world_size", self.world, (2, 4, 8, 16, 32) if product == "A3" else (2, 4, 8), product
            )
            yield from _outside("the first matrix's width", self.inner, 256, 65534, product)


class Handover(NamedTuple):
    """The sizes of a call of npu_attention_to_ffn or npu_ffn_to_attention."""

    operator: str
    world: int
    hidden: int
    tokens: int
    k: int  # experts of a token; of npu_ffn_to_attention with the shared ones
    shared: int
    experts: int
    batches: int = 1  # micro batches of npu_ffn_to_attention

    def breaches(self, product: Product) -> Iterable[str]:
        """Yields one sentence for each limit of the product that the call breaks."""
        if product == "A2":
            yield f"{self.operator} does not exist on A2, expected A3"
        yield from _outside("world_size", self.world, 2, 768, "A3")
        yield from _outside("the hidden size", self.hidden, 1024, 8192, "A3")
        yield from _outside("the number of tokens", self.tokens, 1, 512, "A3")
        most = 16 if self.operator == "npu_attention_to_ffn" else 20
        yield from _outside("the number of experts of a token", self.k, 1, most, "A3")
        yield from _outside("the number of shared experts", self.shared, 0, 4, "A3")
        yield from _outside("moe_expert_num", self.experts, 1, 1024, "A3")
        yield from _outside("the number of micro batches", self.batches, 1, 1, "A3")
