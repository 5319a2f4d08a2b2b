"""What MindSpore's communication primitives do, on arrays in host memory: the shapes of their outputs, and the call.

A rule gets a primitive's attributes, this rank's communicator and the inputs. Outside of a graph the outputs are then
made; in a graph MindSpore has made them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv._calls.collectives import Transfer
from alltoallv._calls.counts import rows_of, share_of
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.graph import ARRAYS, Array

Attributes = Mapping[str, Any]  # of a primitive; in a graph, as text
Shape = tuple[int, ...]


class Plan(NamedTuple):
    """A call that has passed this rank's checks: the outputs' shapes, and what fills such outputs."""

    shapes: Sequence[Shape]
    run: Callable[[Sequence[Array]], None]


Rule = Callable[[Attributes, Communicator, Sequence[Array]], Plan]
RULES: dict[str, tuple[str, Rule]] = {}  # by primitive: the operator that hears of errors, and the rule


def rule(primitive: str, operator: str) -> Callable[[Rule], Rule]:
    """Registers a rule under the names of its primitive and of the core's operator."""

    def register(check: Rule) -> Rule:
        RULES[primitive] = operator, check
        return check

    return register


def plan(primitive: str, attributes: Attributes, inputs: Sequence[Array]) -> Plan:
    """Returns the call of a primitive; the group's ranks hear of an error of this rank."""
    operator, check = RULES[primitive]
    comm = groups.resolve(attributes["group"])
    with guard(comm, operator):
        checked = check(attributes, comm, inputs)

    def run(outputs: Sequence[Array]) -> None:
        with guard(comm, operator):
            shapes = [tuple(out.shape) for out in outputs]
            if [*map(math.prod, shapes)] != [*map(math.prod, checked.shapes)]:
                raise InvalidTensorError(
                    f"{primitive} has output shapes {shapes}, expected {list(checked.shapes)}", id=2085
                )
        checked.run(outputs)

    return Plan(checked.shapes, run)


def values(value: Any) -> Any:
    """Returns an attribute's tuple, which in a graph is text."""
    return ast.literal_eval(value) if isinstance(value, str) else value


def _call(comm: Communicator, operator: str, outputs: Any, inputs: Any = None, **terms: Any) -> None:
    with guard(comm, operator):
        ready = _core.CheckedCall(ARRAYS, comm.core, operator, outputs, inputs, **terms)
    ready.run()


def _exchange(
    comm: Communicator, x: Array, out: Array, sends: Any, recvs: Any, sdispls: Any = None, rdispls: Any = None
) -> None:
    with guard(comm, "all_to_all_v"):
        asked = _core.Request.all_to_all_v(comm.size, (x.size,), sends, recvs, sdispls, rdispls, "element")
        exchange = Transfer(ARRAYS, comm, "all_to_all_v", (x.size,), (out.size,), asked.layout, 1)
    exchange.run(x.reshape(-1), out.reshape(-1))


def _rows(x: Array, size: int, parts: bool = False) -> Shape:
    """Returns the shape of W inputs along dimension 0, or of one of the input's W parts."""
    rows = rows_of(x.shape, "input_x")
    return (share_of("input_x", x.shape, size) if parts else rows * size, *x.shape[1:])


def _numbers(name: str, inputs: Sequence[Array], entries: int) -> tuple[list[int], Sequence[Array]]:
    """Takes integers from the inputs, which are one tensor or as many scalars; returns them and the other inputs."""
    if inputs and inputs[0].ndim:
        taken, others = inputs[0].reshape(-1).tolist(), inputs[1:]
    else:
        taken, others = [int(each) for each in inputs[:entries]], inputs[entries:]
    if len(taken) != entries or not all(isinstance(n, int) and n >= 0 for n in taken):
        raise InvalidParamError(f"{name} is {taken}, expected {entries} integers of at least 0", id=1343)
    return taken, others


def _flat(x: Array) -> Array:
    if x.ndim != 1:
        raise InvalidTensorError(f"input_x has shape {x.shape}, expected 1 dimension: flatten it", id=2088)
    return x


def _block(attributes: Attributes) -> int:
    return _core.checked_least("block_size", int(attributes["block_size"]), 1)


@rule("AllReduce", "all_reduce")
def _all_reduce(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    return Plan([x.shape], lambda outs: _call(comm, "all_reduce", outs[0], x, reduce_op=attributes["op"]))


@rule("Reduce", "reduce")
def _reduce(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    root = _core.checked_rank("dest_rank", int(attributes["dest_rank"]), comm.size)

    def run(outputs: Sequence[Array]) -> None:
        total = outputs[0] if comm.rank == root else x.copy()
        if comm.rank == root:
            total[...] = x
        else:
            outputs[0][...] = 0
        _call(comm, "reduce", total, root=root, reduce_op=attributes["op"])

    return Plan([x.shape if comm.rank == root else (1,)], run)


@rule("AllGather", "all_gather")
def _all_gather(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    return Plan([_rows(x, comm.size)], lambda outs: _call(comm, "all_gather", outs[0], x, one_tensor=True))


@rule("AllGatherV", "all_gather")
def _all_gather_v(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    x = _flat(inputs[0])
    counts, _ = _numbers("output_split_sizes", inputs[1:], comm.size)
    names = "output", "input_x", "output_split_sizes"
    return Plan(
        [(sum(counts),)],
        lambda outs: _call(comm, "all_gather", outs[0], x, counts=counts, one_tensor=True, names=names),
    )


@rule("ReduceScatter", "reduce_scatter")
def _reduce_scatter(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    terms = {"reduce_op": attributes["op"]}
    return Plan([_rows(x, comm.size, parts=True)], lambda outs: _call(comm, "reduce_scatter", outs[0], x, **terms))


@rule("ReduceScatterV", "reduce_scatter")
def _reduce_scatter_v(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    x = _flat(inputs[0])
    counts, _ = _numbers("input_split_sizes", inputs[1:], comm.size)
    terms: Any = {"reduce_op": attributes["op"], "counts": counts, "names": ("output", "input_x", "input_split_sizes")}
    return Plan([(counts[comm.rank],)], lambda outs: _call(comm, "reduce_scatter", outs[0], x, **terms))


@rule("Broadcast", "broadcast")
def _broadcast(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    root = groups.rank_in(attributes["group"], int(attributes["root_rank"]), "root_rank")

    def run(outputs: Sequence[Array]) -> None:
        for out, x in zip(outputs, inputs, strict=True):
            out[...] = x
            _call(comm, "broadcast", out, root=root)

    return Plan([x.shape for x in inputs], run)


@rule("CollectiveScatter", "scatter")
def _scatter(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    root = groups.rank_in(attributes["group"], int(attributes["src_rank"]), "src_rank")
    shape = _rows(x, comm.size, parts=True)
    parts = [x[j * shape[0] : (j + 1) * shape[0]] for j in range(comm.size)] if comm.rank == root else []
    return Plan([shape], lambda outs: _call(comm, "scatter", outs[0], parts, root=root))


@rule("CollectiveGather", "gather")
def _gather(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    root = groups.rank_in(attributes["group"], int(attributes["dest_rank"]), "dest_rank")
    gathered_shape = _rows(x, comm.size)

    def run(outputs: Sequence[Array]) -> None:
        n, at_root = x.shape[0], comm.rank == root
        parts = [outputs[0][j * n : (j + 1) * n] for j in range(comm.size)] if at_root else []
        if not at_root:
            outputs[0][...] = 0
        _call(comm, "gather", parts, x, root=root)

    return Plan([gathered_shape if comm.rank == root else (1,)], run)


@rule("AlltoAll", "all_to_all_v")
def _all_to_all(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    count, split, concat = (int(attributes[name]) for name in ("split_count", "split_dim", "concat_dim"))
    if count != comm.size:
        raise InvalidParamError(f"split_count is {count}, expected {comm.size}, the number of ranks", id=1345)
    for name, dim in (("split_dim", split), ("concat_dim", concat)):
        if not -x.ndim <= dim < x.ndim:
            raise InvalidParamError(f"{name} is {dim}, expected a dimension of the input, which has {x.ndim}", id=1346)
    shape = list(x.shape)
    shape[split] = share_of("input_x", x.shape, count, split)
    part, each = tuple(shape), [x.size // count] * count
    shape[concat] *= count

    def run(outputs: Sequence[Array]) -> None:
        sent = np.stack(np.split(x, count, split))
        received = np.empty_like(sent)
        _exchange(comm, sent, received, each, each)
        np.concatenate(list(received.reshape(count, *part)), concat, out=outputs[0])

    return Plan([tuple(shape)], run)


@rule("AlltoAllV", "all_to_all_v")
def _all_to_all_v(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    x, block = _flat(inputs[0]) if inputs[0].ndim else inputs[0], _block(attributes)
    sends, others = _numbers("send_numel_list", inputs[1:], comm.size)
    recvs, _ = _numbers("recv_numel_list", others, comm.size)
    return _blocks(comm, x, [n * block for n in sends], [n * block for n in recvs])


@rule("AlltoAllVC", "all_to_all_v")
def _all_to_all_v_c(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    x, block, size = _flat(inputs[0]) if inputs[0].ndim else inputs[0], _block(attributes), comm.size
    entries, _ = _numbers("send_count_matrix", inputs[1:], size * size)
    counts = np.array(entries).reshape(size, size) * block
    if str(attributes["transpose"]).lower() == "true":
        counts = counts.T
    return _blocks(comm, x, counts[comm.rank].tolist(), counts[:, comm.rank].tolist())


def _blocks(comm: Communicator, x: Array, sends: list[int], recvs: list[int]) -> Plan:
    """Plans an exchange of packed elements; MindSpore has a scalar that means nothing where nothing is received."""
    total = sum(recvs)
    sent = x.reshape(-1)[: sum(sends)] if x.size == 1 else x  # such a scalar is nothing to send

    def run(outputs: Sequence[Array]) -> None:
        out = outputs[0].reshape(-1)
        if not total:
            out[...] = 0
        _exchange(comm, sent, out[:total], sends, recvs)

    return Plan([(total,) if total else ()], run)


@rule("Barrier", "barrier")
def _barrier(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    def run(outputs: Sequence[Array]) -> None:
        _core.CheckedCall(ARRAYS, comm.core, "barrier").run()
        for out in outputs:
            out[...] = 0

    return Plan([(1,)], run)


@rule("Send", "send")
def _send(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,) = inputs
    ready = _message("send", comm, x, int(attributes["dest_rank"]), int(attributes["sr_tag"]))

    def run(outputs: Sequence[Array]) -> None:
        outputs[0][...] = x
        ready.run()

    return Plan([x.shape], run)


@rule("Receive", "recv")
def _receive(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    shape = tuple(values(attributes["shape"]))
    peer, tag = int(attributes["src_rank"]), int(attributes["sr_tag"])

    def run(outputs: Sequence[Array]) -> None:
        _message("recv", comm, outputs[0], peer, tag).run()

    return Plan([shape], run)


def _message(operator: str, comm: Communicator, x: Array, peer: int, tag: int, waits: bool = True) -> messages.Message:
    memory = x.ctypes.data, x.nbytes
    return messages.post(operator, comm, ARRAYS.dtype(x), memory, peer, tag, waits=waits)


@rule("BatchISendIRecv", "send")
def _batch(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    kinds, peers = values(attributes["op_types"]), values(attributes["remote_ranks"])
    sent, shapes = iter(inputs), iter(values(attributes["receive_shapes"]))
    for kind in kinds:
        if kind not in ("isend", "irecv"):
            raise InvalidParamError(f"op_types has {kind!r}, expected 'isend' or 'irecv'", id=1347)
    for name, items, kind in (("input_x", inputs, "isend"), ("receive_shapes", list(shapes), "irecv")):
        if len(items) != list(kinds).count(kind):
            raise InvalidParamError(f"{name} has {len(items)} entries, expected {list(kinds).count(kind)}", id=1348)
    received = iter(values(attributes["receive_shapes"]))
    outputs = [() if kind == "isend" else tuple(next(received)) for kind in kinds]

    def run(outs: Sequence[Array]) -> None:
        works = []
        for kind, peer, out in zip(kinds, peers, outs, strict=True):
            if kind == "isend":
                out[...] = 0
            operator, array = ("send", next(sent)) if kind == "isend" else ("recv", out)
            works.append(_message(operator, comm, array, peer, 0, waits=False).submit())
        for work in works:
            work.wait()

    return Plan(outputs, run)


@rule("NeighborExchange", "all_to_all_v")
def _neighbors(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    targets, sources = (list(values(attributes[name])) for name in ("send_rank_ids", "recv_rank_ids"))
    shapes = [tuple(shape) for shape in values(attributes["recv_shapes"])]
    expected = [tuple(shape) for shape in values(attributes["send_shapes"])]
    if [x.shape for x in inputs] != expected:
        raise InvalidTensorError(
            f"input_x has shapes {[x.shape for x in inputs]}, expected send_shapes {expected}", id=2090
        )
    sends, sdispls = _regions("send_rank_ids", comm, targets, [x.size for x in inputs])
    recvs, rdispls = _regions("recv_rank_ids", comm, sources, [math.prod(shape) for shape in shapes])

    def run(outputs: Sequence[Array]) -> None:
        dtype = inputs[0].dtype if inputs else outputs[0].dtype
        x = np.concatenate([each.reshape(-1) for each in inputs]) if inputs else np.empty(0, dtype)
        received = np.empty(sum(recvs), dtype)
        _exchange(comm, x, received, sends, recvs, sdispls, rdispls)
        at = 0
        for out in outputs:
            out[...] = received[at : at + out.size].reshape(out.shape)
            at += out.size

    return Plan(shapes, run)


def _regions(name: str, comm: Communicator, ranks: Sequence[int], numels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns counts and displacements by rank of blocks that lie in the order of ``ranks``."""
    if len(set(ranks)) < len(ranks) or len(ranks) != len(numels) or not all(0 <= r < comm.size for r in ranks):
        raise InvalidParamError(
            f"{name} is {list(ranks)}, expected {len(numels)} different ranks below {comm.size}", id=1349
        )
    counts, displs, at = [0] * comm.size, [0] * comm.size, 0
    for rank, numel in zip(ranks, numels, strict=True):
        counts[rank], displs[rank] = numel, at
        at += numel
    return counts, displs


# The eight directions of NeighborExchangeV2, clockwise from the top: which side of rows and of columns they lie on.
_DIRECTIONS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def _edge(side: int, before: int, inside: int, after: int) -> slice:
    """Returns the part of an axis that has a border ``before`` and one ``after``."""
    if side < 0:
        return slice(0, before)
    return slice(before + inside, before + inside + after) if side else slice(before, before + inside)


def _inner(side: int, inside: int, before: int, after: int) -> slice:
    """Returns the part of an axis that a neighbour on that side gets."""
    if side < 0:
        return slice(0, before)
    return slice(inside - after, inside) if side else slice(0, inside)


class _Halo:
    """The borders of NeighborExchangeV2: what this rank gives to its neighbours, and where their parts go."""

    def __init__(self, attributes: Attributes, comm: Communicator) -> None:
        self.targets, self.sources, self.sent_lens, self.received_lens = (
            list(values(attributes[name])) for name in ("send_rank_ids", "recv_rank_ids", "send_lens", "recv_lens")
        )
        layout = attributes.get("data_format", attributes.get("format"))  # in a graph it has the other name
        if layout != "NCHW":
            raise InvalidParamError(f"data_format is {layout!r}, expected 'NCHW'", id=1350)
        for name, ranks in (("send_rank_ids", self.targets), ("recv_rank_ids", self.sources)):
            present = [rank for rank in ranks if rank != -1]
            if len(ranks) != 8 or len(set(present)) < len(present) or not all(0 <= r < comm.size for r in present):
                raise InvalidParamError(
                    f"{name} is {ranks}, expected 8 different ranks below {comm.size}, or -1", id=1351
                )
        for name, lens in (("send_lens", self.sent_lens), ("recv_lens", self.received_lens)):
            if len(lens) != 4 or min(lens) < 0:
                raise InvalidParamError(f"{name} is {lens}, expected 4 numbers of at least 0", id=1352)
        self.comm = comm

    def pad(self) -> list[int]:
        """Returns the borders of the output: top, bottom, left, right; none where no rank sends one."""
        sides = ((0, -1), (0, 1), (1, -1), (1, 1))
        return [
            n if any(r != -1 and _DIRECTIONS[d][axis] == side for d, r in enumerate(self.sources)) else 0
            for n, (axis, side) in zip(self.received_lens, sides, strict=True)
        ]

    def inner(self, height: int, width: int, direction: int) -> tuple[Any, ...]:
        """Returns the part of the input that goes to the neighbour in that direction."""
        (row, column), (top, bottom, left, right) = _DIRECTIONS[direction], self.sent_lens
        return (..., _inner(row, height, top, bottom), _inner(column, width, left, right))

    def edge(self, height: int, width: int, direction: int) -> tuple[Any, ...]:
        """Returns the part of the output that comes from the neighbour in that direction."""
        (row, column), (top, bottom, left, right) = _DIRECTIONS[direction], self.pad()
        return (..., _edge(row, top, height, bottom), _edge(column, left, width, right))

    def exchange(
        self, to: Sequence[int], parts: Sequence[Array], fro: Sequence[int], shapes: Sequence[Shape], like: Array
    ) -> list[Array]:
        """Sends each part to its rank and returns what the ranks of ``fro`` send, in these shapes."""
        sends, sdispls = _regions("send_rank_ids", self.comm, to, [part.size for part in parts])
        recvs, rdispls = _regions("recv_rank_ids", self.comm, fro, [math.prod(shape) for shape in shapes])
        x = np.concatenate([np.empty(0, like.dtype), *(part.reshape(-1) for part in parts)])
        received = np.empty(sum(recvs), like.dtype)
        _exchange(self.comm, x, received, sends, recvs, sdispls, rdispls)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        return [received[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


@rule("NeighborExchangeV2", "all_to_all_v")
def _halo(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    (x,), halo = inputs, _Halo(attributes, comm)
    if x.ndim != 4:
        raise InvalidTensorError(f"input_x has shape {x.shape}, expected 4 dimensions, NCHW", id=2091)
    height, width = x.shape[2:]
    top, bottom, left, right = halo.pad()
    to = [(d, rank) for d, rank in enumerate(halo.targets) if rank != -1]
    fro = [(d, rank) for d, rank in enumerate(halo.sources) if rank != -1]

    def run(outputs: Sequence[Array]) -> None:
        out = outputs[0]
        out[...] = 0
        out[..., top : top + height, left : left + width] = x
        regions = [halo.edge(height, width, d) for d, _ in fro]
        parts = [x[halo.inner(height, width, d)] for d, _ in to]
        shapes = [out[region].shape for region in regions]
        received = halo.exchange([r for _, r in to], parts, [r for _, r in fro], shapes, x)
        for region, part in zip(regions, received, strict=True):
            out[region] = part

    return Plan([(*x.shape[:2], height + top + bottom, width + left + right)], run)


@rule("NeighborExchangeV2Grad", "all_to_all_v")
def _halo_back(attributes: Attributes, comm: Communicator, inputs: Sequence[Array]) -> Plan:
    """The gradient, with the attributes of the forward call swapped as MindSpore swaps them: send is what came."""
    names = {"send_rank_ids": "recv_rank_ids", "send_lens": "recv_lens"}
    forward = {
        **attributes,
        **{a: attributes[b] for a, b in names.items()},
        **{b: attributes[a] for a, b in names.items()},
    }
    (dy,), halo = inputs, _Halo(forward, comm)
    top, bottom, left, right = halo.pad()
    height, width = dy.shape[2] - top - bottom, dy.shape[3] - left - right
    to = [(d, rank) for d, rank in enumerate(halo.sources) if rank != -1]
    fro = [(d, rank) for d, rank in enumerate(halo.targets) if rank != -1]

    def run(outputs: Sequence[Array]) -> None:
        out = outputs[0]
        out[...] = dy[..., top : top + height, left : left + width]
        regions = [halo.inner(height, width, d) for d, _ in fro]
        parts = [dy[halo.edge(height, width, d)] for d, _ in to]
        shapes = [out[region].shape for region in regions]
        received = halo.exchange([r for _, r in to], parts, [r for _, r in fro], shapes, dy)
        for region, part in zip(regions, received, strict=True):
            out[region] += part

    return Plan([(*dy.shape[:2], height, width)], run)
