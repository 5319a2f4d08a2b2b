"""Finds the ranks that an operator names by HCCL's name of their communicator, and exchanges their data.

On emulated NPUs they are torch_npu's process group, whose HCCL moves the data (alltoallv_emulator/exchange.py); on CPU
tensors any other group of torch.distributed, through `alltoallv.torch`. Both tell all ranks when ranks disagree.
"""

from __future__ import annotations

import json
import math
import struct
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.npu_ops.registry import exchanges, this_call

Values = dict[str, Any]  # numbers and texts that must be equal on all ranks, by what they are

_BYTES = 4096  # in which a rank announces its call: a header, then JSON
# The length of the text, and digests of the counts that it sends and expects. In front of rows is no text, but a
# negative digest of it.
_HEADER = struct.Struct("qqq")
_DIGESTS = 2**62  # they are smaller

# The operator, its values, why the rank refuses, and the difference of its digests.
_Descriptor = tuple[str, Values, str, int]


_Parts = dict[tuple[int, ...], dist.ProcessGroup]
_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Parts] = weakref.WeakKeyDictionary()  # by the group they are of


def named(hcom: str | dist.ProcessGroup, world_size: int | None = None) -> Group:
    """Returns the group with this name.

    Args:
        hcom: A ProcessGroup, its ``group_name``, "" for the default group, or on NPUs what ``get_hccl_comm_name`` gave.
        world_size: The size that the operator's caller gave; None if it takes none.

    Raises:
        InvalidParamError: No group of this process has the name, or it has another size.
    """
    group = _found(hcom)
    if group is None:
        raise InvalidParamError(
            f"hcom is {hcom!r}, expected the name of a process group that this process has made", id=1407
        )
    if world_size not in (None, group.size):
        raise InvalidParamError(
            f"the world size is {world_size}, expected {group.size}, the size of group {hcom!r}", id=1408
        )
    return group


def _found(hcom: str | dist.ProcessGroup) -> Group | None:
    if not isinstance(hcom, str):
        return Group(hcom, None) if isinstance(hcom, dist.ProcessGroup) else None
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    if hcom == "" and groups:
        return Group(dist.group.WORLD, None)
    for group in groups:
        if group.group_name == hcom:
            return Group(group, None)
    if "npu" not in exchanges:
        return None
    device = torch.device("npu", torch.npu.current_device())  # whose number need not be the rank's
    for group in groups:
        if "npu" not in {kind.type for kind in group._device_types}:
            continue
        if group._get_backend(device).get_hccl_comm_name(device.index, init_comm=False) == hcom:
            return Group(group, device)
    return None


class Group:
    """Exchanges tensors in host memory among ranks 0 to ``size`` - 1 of a process group; ``rank`` is this one."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job, in the order of the group's."""
        return dist.get_process_group_ranks(self._group)

    def part(self, ranks: Sequence[int]) -> Group:
        """Returns the group of some of the ranks, in their order; the others take no part in making it."""
        own, parent = self.ranks, self._group or dist.group.WORLD
        members = tuple(own[rank] for rank in ranks)
        if len(members) == self.size:
            return self
        if parent not in _parts:
            _parts[parent] = {}
            weakref.finalize(parent, _destroy, _parts[parent]).atexit = False
        if members not in _parts[parent]:
            kind = dist.get_backend(self._group)
            _parts[parent][members] = dist.new_group(list(members), backend=kind, use_local_synchronization=True)
        return Group(_parts[parent][members], self._device)

    def all_to_all(self, rows: Tensor, sends: Sequence[int], recvs: Sequence[int]) -> Tensor:
        """Sends ``sends[j]`` rows to rank j, in rank order; returns the received rows of all ranks, in that order."""
        if self._device is not None:
            return exchanges["npu"](self._group, self._device, rows, sends, recvs)
        from alltoallv.torch import all_to_all_v  # not imported for NPUs, whose programs start sooner without it

        return all_to_all_v(rows, sends, recvs, unit="row", group=self._group)

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, all of one shape, stacked along a new first dimension."""
        return self.all_to_all(x.expand(self.size, *x.shape), [1] * self.size, [1] * self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Adds the tensors of all ranks in float32, in rank order; returns this rank's equal part of the rows."""
        return self.all_to_all(x.unflatten(0, (self.size, -1)), [1] * self.size, [1] * self.size).float().sum(0)

    def agree(self, operator: str, same: Values, sends: Sequence[int] = (), recvs: Sequence[int] = ()) -> None:
        """Raises PeerMismatchError on all ranks unless the values are equal on all, and no rank refuses the call.

        It also raises, as `check_counts` does, unless what each rank sends is what its receiver expects.
        """
        digests = self._digests(sends, recvs)
        this_call.met = True
        descriptors = self.gather_descriptors(operator, same, "", digests)
        for rank, (name, values, refusal, _) in enumerate(descriptors):
            if refusal:
                raise PeerMismatchError(f"rank {rank} refuses {name}: {refusal}", id=3021)
            if name != operator:
                raise PeerMismatchError(
                    f"rank {rank} is in {name} and rank {self.rank} in {operator}, expected the same", id=3022
                )
            first = descriptors[0][1]
            for key in first | values:
                if first.get(key) != values.get(key):
                    raise PeerMismatchError(
                        f"{operator}: {key} is {first.get(key)} on rank 0 and {values.get(key)} on rank {rank}, "
                        "expected the same on all ranks",
                        id=3023,
                    )
        if sum(difference for *_, difference in descriptors) % _DIGESTS:
            check_counts(self, operator, sends, recvs)

    def exchange_agreed(
        self, operator: str, same: Values, rows: Tensor, sends: Sequence[int], recvs: Sequence[int]
    ) -> Tensor:
        """Agrees on values and counts, as `agree`, and exchanges rows that lie by rank and by expert, like the counts.

        NPUs' ranks meet once for both: each puts its digests in front of its rows. Only ranks that differ meet again.
        """
        each = len(sends) // self.size
        to, of = ([sum(counts[i : i + each]) for i in range(0, len(counts), each)] for counts in (sends, recvs))
        if self._device is None:
            self.agree(operator, same, sends, recvs)
            return self.all_to_all(rows, to, of)
        call = ~zlib.crc32(repr((operator, same)).encode())
        header = _HEADER.pack(call, *self._digests(sends, recvs))
        width = math.prod(rows.shape[1:]) * rows.itemsize
        parts = rows.contiguous().view(-1).view(torch.uint8).split_with_sizes([count * width for count in to])
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        nbytes = [[len(header) + count * width for count in counts] for counts in (to, of)]
        packed = torch.cat([piece for part in parts for piece in (head, part)])
        this_call.met = True
        try:
            arrived = exchanges["npu"](self._group, self._device, packed, *nbytes)
        except RuntimeError:
            self.agree(operator, same, sends, recvs)  # explains why, if it is a difference
            raise
        pieces = arrived.split_with_sizes([size for count in of for size in (len(header), count * width)])
        headers = list(_HEADER.iter_unpack(torch.cat(pieces[::2]).numpy()))
        if (
            any(entry[0] != call for entry in headers)
            or sum(sent - expected for _, sent, expected in headers) % _DIGESTS
        ):
            self.agree(operator, same, sends, recvs)
            raise PeerMismatchError(
                f"{operator}: the ranks differed in what they sent, but not when they compared it", id=3024
            )
        return torch.cat(pieces[1::2]).view(rows.dtype).view(sum(of), *rows.shape[1:])

    def _digests(self, sends: Sequence[int], recvs: Sequence[int]) -> list[int]:
        each, ranks = len(sends) // self.size, range(self.size)
        return [
            sum(hash((self.rank, rank, *sends[rank * each : (rank + 1) * each])) for rank in ranks) % _DIGESTS,
            sum(hash((rank, self.rank, *recvs[rank * each : (rank + 1) * each])) for rank in ranks) % _DIGESTS,
        ]

    def gather_descriptors(
        self, operator: str, values: Values, refusal: str, digests: Sequence[int] = (0, 0)
    ) -> list[_Descriptor]:
        """Announces this rank's call, its values and a refusal, if any; returns what every rank announces."""
        text = json.dumps([operator, values, refusal[: _BYTES // 8]]).encode()
        data = _HEADER.pack(len(text), *digests) + text
        row = torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.int8)
        descriptors: list[_Descriptor] = []
        for record in self._gathered(row).numpy():
            length, sent, expected = _HEADER.unpack_from(record)
            payload = record[_HEADER.size : _HEADER.size + length].tobytes()
            name, announced, why = (operator, values, refusal) if payload == text else json.loads(payload)
            descriptors.append((name, announced, why, sent - expected))
        return descriptors

    def _gathered(self, row: Tensor) -> Tensor:
        """Gathers descriptors; again if a peer was in `exchange_agreed`, which learns so that the calls differ."""
        try:
            rows = self.all_gather(row)
            if all(_HEADER.unpack_from(record)[0] >= 0 for record in rows.numpy()):
                return rows
        except RuntimeError:
            if self._device is None:
                raise
        return self.all_gather(row)


def _destroy(parts: _Parts) -> None:
    for part in parts.values():
        if part in dist.distributed_c10d._world.pg_map:  # not where all groups have been destroyed
            dist.destroy_process_group(part)


def refuse(hcom: Any, operator: str, why: str) -> None:
    """Announces this rank's refusal to the others of a group, or of its name, which wait in `Group.agree`."""
    group = hcom if isinstance(hcom, Group) else _found(hcom)
    if group is not None:
        group.gather_descriptors(operator, {}, why)


def check_counts(group: Group, operator: str, sends: Sequence[int], recvs: Sequence[int]) -> None:
    """Raises PeerMismatchError on all ranks unless what each rank sends is what its receiver expects.

    For each rank, in order, both have a number of rows for each expert of the receiver or the sender.
    """
    each = len(sends) // group.size
    counts = group.all_gather(torch.tensor([list(sends), list(recvs)]))
    sent, expected = counts.view(group.size, 2, group.size, each).unbind(1)
    wrong = (sent != expected.transpose(0, 1)).nonzero().tolist()
    if wrong:
        source, target, expert = wrong[0]
        raise PeerMismatchError(
            f"{operator}: rank {source} sends {sent[source, target, expert]} rows of expert {expert} to rank {target}, "
            f"which expects {expected[target, source, expert]}",
            id=3025,
        )
