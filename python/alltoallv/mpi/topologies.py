"""Communicators made of others: of some of their ranks, of a grid or of a graph, with collectives among neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alltoallv import communicator
from alltoallv import numpy as an
from alltoallv._calls.guard import guard
from alltoallv._calls.messages import pickled
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mpi.communicators import Comm, exchange_objects, note_world_ranks, worlds
from alltoallv.mpi.constants import CART, DIST_GRAPH, GRAPH, PROC_NULL, UNDEFINED, UNWEIGHTED, WEIGHTS_EMPTY
from alltoallv.mpi.datatypes import Array, Blocks, simple, typed, vector
from alltoallv.mpi.groups import Group
from alltoallv.mpi.requests import Request

Edge = tuple[int, int]  # the rank at the other end, and a number that both ends of an edge give it


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Returns ``dims`` with its zeros replaced, as equal as can be and in falling order: they make ``nnodes``."""
    sizes = [0] * dims if isinstance(dims, int) else list(dims)
    fixed = math.prod(n for n in sizes if n)
    if nnodes < 1 or any(n < 0 for n in sizes) or nnodes % fixed or (0 not in sizes and fixed != nnodes):
        raise InvalidParamError(f"dims is {sizes}, expected dimensions whose product divides {nnodes} ranks", id=1394)
    free = _balanced(nnodes // fixed, sizes.count(0))
    return [n or free.pop(0) for n in sizes]


def _balanced(total: int, count: int) -> list[int]:
    """Returns ``count`` factors of ``total``, of which the largest is as small as can be, in falling order."""
    if count == 0:
        return []
    if count == 1:
        return [total]
    first = next(n for n in range(1, total + 1) if total % n == 0 and n**count >= total)
    return sorted([first, *_balanced(total // first, count - 1)], reverse=True)


class Intracomm(Comm):
    """The kind that all communicators here are, from which those with neighbours are made."""

    def Create_cart(self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False) -> Any:
        """Returns a `Cartcomm`; COMM_NULL on ranks beyond the grid. Ranks keep their order with ``reorder`` too."""
        return create_cart(self, dims, periods)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """Returns this rank's number in such a grid, its own; UNDEFINED beyond it."""
        return self.rank if self.rank < math.prod(dims) else UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Returns this rank's number in such a graph, its own; UNDEFINED beyond it."""
        return self.rank if self.rank < len(index) else UNDEFINED

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        return create_graph(self, index, edges)

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Any = None,
        destweights: Any = None,
        info: Any = None,
        reorder: bool = False,
    ) -> Any:
        return create_dist_graph_adjacent(self, sources, destinations, sourceweights, destweights)

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any = None,
        info: Any = None,
        reorder: bool = False,
    ) -> Any:
        return create_dist_graph(self, sources, degrees, destinations, weights)

    def Split(self, color: int = 0, key: int = 0) -> Intracomm:
        if color != UNDEFINED and isinstance(color, int | np.integer) and color < 0:
            with guard(self.alltoallv, "all_gather"):
                raise InvalidParamError(f"color is {color}, expected one >= 0 or UNDEFINED", id=1395)
        comm = self.alltoallv.split(None if color == UNDEFINED else color, key)
        return COMM_NULL if comm is None else Intracomm(note_world_ranks(comm, self.alltoallv))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Intracomm:
        """Returns the ranks of this one's host, for COMM_TYPE_SHARED."""
        if split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise NotImplementedError(f"split_type is {split_type!r}, expected COMM_TYPE_SHARED")
        own = _host() if split_type == COMM_TYPE_SHARED else None
        names = an.all_gather_object(own, group=self.alltoallv)
        return self.Split(UNDEFINED if own is None else names.index(own), key)

    def Create(self, group: Group) -> Intracomm:
        """Returns a communicator of the group's ranks, in its order; collective over this one."""
        return self.Split(0 if group.Get_rank() >= 0 else UNDEFINED, max(group.Get_rank(), 0))


class Topocomm(Intracomm):
    """Ranks with neighbours. Neighbours that are PROC_NULL send nothing, and their blocks keep their values."""

    def _edges(self) -> tuple[list[Edge], list[Edge]]:
        """Returns the edges that come in and those that go out, in the order of blocks."""
        raise NotImplementedError

    @property
    def indegree(self) -> int:
        return len(self._edges()[0])

    @property
    def outdegree(self) -> int:
        return len(self._edges()[1])

    @property
    def inedges(self) -> list[int]:
        return [peer for peer, _ in self._edges()[0]]

    @property
    def outedges(self) -> list[int]:
        return [peer for peer, _ in self._edges()[1]]

    inoutedges = property(lambda self: (self.inedges, self.outedges))

    def _neighbor(
        self,
        sendbuf: Any,
        recvbuf: Any,
        later: bool,
        send: Callable[[str, Any, int], Blocks],
        receive: Callable[[str, Any, int], Blocks],
        *,
        same: bool = False,
    ) -> Request | None:
        """Exchanges blocks along the edges; ``same``: the one block that is sent goes along each."""
        comm = self.alltoallv
        with guard(comm, "all_to_all_v"):
            into, out = self._edges()
            going = send("sendbuf", sendbuf, 1 if same else len(out))
            coming = receive("recvbuf", recvbuf, len(into))
            parts = [going.packed()] * len(out) if same else _split(going.packed(), going.sizes)
            x, sends = _by_rank(parts, out, comm, going.dtype)
            old = coming.packed() if into else np.zeros(0, coming.dtype)
            order = _order(into)
            recvs = [sum(coming.sizes[j] for j in order if into[j][0] == peer) for peer in range(comm.size)]
        result: Any = an.all_to_all_v(x, sends, recvs, group=comm, async_op=later)  # type: ignore[call-overload]

        def store(data: Array) -> None:
            blocks = _split(old, coming.sizes)
            begin = 0
            for j in order:
                blocks[j] = data[begin : begin + coming.sizes[j]]
                begin += coming.sizes[j]
            if blocks:
                target, put = coming.target()
                target[...] = np.concatenate(blocks)
                put()

        if later:
            output, work = result
            return Request(work, lambda status: store(output))
        store(result)
        return None

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self._neighbor(sendbuf, recvbuf, False, simple, simple, same=True)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _request(self._neighbor(sendbuf, recvbuf, True, simple, simple, same=True))

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        self._neighbor(sendbuf, recvbuf, False, simple, vector, same=True)

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _request(self._neighbor(sendbuf, recvbuf, True, simple, vector, same=True))

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        self._neighbor(sendbuf, recvbuf, False, simple, simple)

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _request(self._neighbor(sendbuf, recvbuf, True, simple, simple))

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        self._neighbor(sendbuf, recvbuf, False, vector, vector)

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _request(self._neighbor(sendbuf, recvbuf, True, vector, vector))

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        self._neighbor(sendbuf, recvbuf, False, typed, typed)

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _request(self._neighbor(sendbuf, recvbuf, True, typed, typed))

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Returns the objects of the neighbours, None of PROC_NULL."""
        return self._neighbor_objects([sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Sends object j along edge j; returns what came, None from PROC_NULL."""
        return self._neighbor_objects(sendobj)

    def _neighbor_objects(self, values: Sequence[Any]) -> list[Any]:
        comm = self.alltoallv
        with guard(comm, "exchange_counts"):
            into, out = self._edges()
            if len(values) != len(out):
                raise InvalidParamError(
                    f"sendobj has {len(values)} objects, expected {len(out)}, one for each neighbour", id=1396
                )
            order = _order(out)
            lists: list[list[Any]] = [[] for _ in range(comm.size)]
            for j in order:
                lists[out[j][0]].append(values[j])
            parts = [pickled("sendobj", each) if each else b"" for each in lists]
        came = exchange_objects(comm, parts)
        received: list[Any] = [None] * len(into)
        for j in _order(into):
            received[j] = came[into[j][0]].pop(0)
        return received


class Cartcomm(Topocomm):
    """Ranks in a grid, the last dimension fastest."""

    _dims: list[int]
    _periods: list[bool]

    def Get_topology(self) -> int:
        return CART

    def Get_dim(self) -> int:
        return len(self._dims)

    dim = ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        return list(self._dims), [int(each) for each in self._periods], self.Get_coords(self.rank)

    topo = property(Get_topo)
    dims = property(lambda self: list(self._dims))
    periods = property(lambda self: [int(each) for each in self._periods])
    coords = property(lambda self: self.Get_coords(self.rank))

    def Get_coords(self, rank: int) -> list[int]:
        return [int(n) for n in np.unravel_index(self._peer("rank", rank), self._dims)] if self._dims else []

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        if len(coords) != len(self._dims):
            raise InvalidParamError(f"coords is {list(coords)}, expected {len(self._dims)} coordinates", id=1397)
        rank = self._at(coords)
        if rank == PROC_NULL:
            raise InvalidParamError(f"coords is {list(coords)}, expected a point of the grid {self._dims}", id=1398)
        return rank

    def _at(self, coords: Sequence[int]) -> int:
        rank = 0
        for n, size, period in zip(coords, self._dims, self._periods, strict=True):
            if not period and not 0 <= n < size:
                return PROC_NULL
            rank = rank * size + n % size
        return rank

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Returns the source and the destination of a shift along a dimension; PROC_NULL beyond an edge."""
        if not 0 <= direction < len(self._dims):
            raise InvalidParamError(f"direction is {direction}, expected a dimension below {len(self._dims)}", id=1399)
        back, ahead = self.coords, self.coords
        back[direction] -= disp
        ahead[direction] += disp
        return self._at(back), self._at(ahead)

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """Returns the grid of the dimensions that remain; collective."""
        with guard(self.alltoallv, "all_gather"):
            if len(remain_dims) != len(self._dims):
                raise InvalidParamError(
                    f"remain_dims is {list(remain_dims)}, expected {len(self._dims)} values", id=1400
                )
        left = [n for n, remains in zip(self.coords, remain_dims, strict=True) if not remains]
        sizes = [n for n, remains in zip(self._dims, remain_dims, strict=True) if not remains]
        color = int(np.ravel_multi_index(left, sizes)) if sizes else 0
        sub = Cartcomm(self.Split(color, self.rank)._made)
        sub._dims = [n for n, remains in zip(self._dims, remain_dims, strict=True) if remains]
        sub._periods = [each for each, remains in zip(self._periods, remain_dims, strict=True) if remains]
        return sub

    def _edges(self) -> tuple[list[Edge], list[Edge]]:
        into, out = [], []
        for direction in range(len(self._dims)):
            below, above = self.Shift(direction, 1)
            # What goes down comes from above: in a dimension of two ranks, both edges lead to one rank.
            into += [(below, 2 * direction + 1), (above, 2 * direction)]
            out += [(below, 2 * direction), (above, 2 * direction + 1)]
        return into, out


class Graphcomm(Topocomm):
    """Ranks of a graph whose edges every rank knows, as Create_graph is given it."""

    _index: list[int]
    _all_edges: list[int]

    def Get_topology(self) -> int:
        return GRAPH

    def Get_dims(self) -> tuple[int, int]:
        return len(self._index), len(self._all_edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        return list(self._index), list(self._all_edges)

    dims, topo = property(Get_dims), property(Get_topo)
    nnodes = property(lambda self: len(self._index))
    nedges = property(lambda self: len(self._all_edges))
    index = property(lambda self: list(self._index))
    edges = property(lambda self: list(self._all_edges))

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        rank = self._peer("rank", rank)
        return self._all_edges[self._index[rank - 1] if rank else 0 : self._index[rank]]

    nneighbors = property(lambda self: self.Get_neighbors_count(self.rank))
    neighbors = property(lambda self: self.Get_neighbors(self.rank))

    def _edges(self) -> tuple[list[Edge], list[Edge]]:
        edges = [(peer, j) for j, peer in enumerate(self.Get_neighbors(self.rank))]
        return edges, edges


class Distgraphcomm(Topocomm):
    """Ranks of a graph of which each knows its own edges."""

    _sources: list[int]
    _destinations: list[int]
    _weights: tuple[list[int], list[int]] | None

    def Get_topology(self) -> int:
        return DIST_GRAPH

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        return len(self._sources), len(self._destinations), self._weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        return list(self._sources), list(self._destinations), self._weights

    def _edges(self) -> tuple[list[Edge], list[Edge]]:
        into, out = ([(peer, j) for j, peer in enumerate(ends)] for ends in (self._sources, self._destinations))
        return into, out


def create_cart(comm: Intracomm, dims: Sequence[int], periods: Sequence[bool] | bool | None) -> Cartcomm | Intracomm:
    with guard(comm.alltoallv, "all_gather"):
        dims = [int(n) for n in ([dims] if isinstance(dims, int) else dims)]
        flags = (
            [bool(periods)] * len(dims) if periods is None or isinstance(periods, bool) else [bool(p) for p in periods]
        )
        if any(n < 1 for n in dims) or math.prod(dims) > comm.size:
            raise InvalidParamError(
                f"dims is {dims}, expected dimensions of at most {comm.size} ranks together", id=1401
            )
        if len(flags) != len(dims):
            raise InvalidParamError(f"periods is {flags}, expected {len(dims)} values, one for each dimension", id=1402)
    part = comm.Split(0 if comm.rank < math.prod(dims) else UNDEFINED, comm.rank)
    if not part:
        return COMM_NULL
    cart = Cartcomm(part._made)
    cart._dims, cart._periods = dims, flags
    return cart


def create_graph(comm: Intracomm, index: Sequence[int], edges: Sequence[int]) -> Graphcomm | Intracomm:
    with guard(comm.alltoallv, "all_gather"):
        ends, every = [int(n) for n in index], [int(n) for n in edges]
        if ends and ends[0] == 0:  # one more than ranks, as CSR has it
            del ends[0]
        if len(ends) > comm.size or sorted(ends) != ends or (ends[-1] if ends else 0) != len(every):
            raise InvalidParamError(
                f"index is {ends}, expected rising numbers of edges for at most {comm.size} ranks, up to {len(every)}",
                id=1403,
            )
        if any(not 0 <= peer < len(ends) for peer in every):
            raise InvalidParamError(f"edges is {every}, expected ranks below {len(ends)}", id=1404)
    part = comm.Split(0 if comm.rank < len(ends) else UNDEFINED, comm.rank)
    if not part:
        return COMM_NULL
    graph = Graphcomm(part._made)
    graph._index, graph._all_edges = ends, every
    return graph


def create_dist_graph_adjacent(
    comm: Intracomm,
    sources: Sequence[int] | None,
    destinations: Sequence[int] | None,
    sourceweights: Any,
    destweights: Any,
) -> Distgraphcomm:
    with guard(comm.alltoallv, "all_gather"):
        into = [comm._peer("sources", peer) for peer in sources or ()]
        out = [comm._peer("destinations", peer) for peer in destinations or ()]
        weights = [_weights("sourceweights", sourceweights, into), _weights("destweights", destweights, out)]
    graph = Distgraphcomm(comm.Split(0, comm.rank)._made)
    graph._sources, graph._destinations = into, out
    graph._weights = None if weights[0] is None or weights[1] is None else (weights[0], weights[1])
    return graph


def create_dist_graph(
    comm: Intracomm, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int], weights: Any
) -> Distgraphcomm:
    with guard(comm.alltoallv, "all_gather"):
        begins = [comm._peer("sources", peer) for peer in sources for _ in range(degrees[list(sources).index(peer)])]
        ends = [comm._peer("destinations", peer) for peer in destinations]
        if len(begins) != len(ends):
            raise InvalidParamError(
                f"destinations has {len(ends)} ranks, expected {len(begins)}, the sum of degrees", id=1405
            )
        heavy = _weights("weights", weights, ends)
    own = list(zip(begins, ends, heavy or [1] * len(ends), strict=True))
    edges = [edge for each in comm.allgather((own, heavy is not None)) for edge in each[0]]
    into = [(begin, weight) for begin, end, weight in edges if end == comm.rank]
    out = [(end, weight) for begin, end, weight in edges if begin == comm.rank]
    into_weights, out_weights = ([weight for _, weight in each] if heavy is not None else None for each in (into, out))
    return create_dist_graph_adjacent(
        comm, [peer for peer, _ in into], [peer for peer, _ in out], into_weights, out_weights
    )


def _weights(name: str, weights: Any, peers: Sequence[int]) -> list[int] | None:
    if weights is None or weights is UNWEIGHTED:
        return None
    values = [] if weights is WEIGHTS_EMPTY else [int(weight) for weight in weights]
    if len(values) != len(peers):
        raise InvalidParamError(
            f"{name} has {len(values)} weights, expected {len(peers)}, one for each neighbour", id=1406
        )
    return values


def _split(packed: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(packed, np.cumsum(sizes)[:-1]) if sizes else []


def _order(edges: Sequence[Edge]) -> list[int]:
    """Returns the places of the edges in the order in which their data travel: by rank, then by number."""
    return sorted((j for j, (peer, _) in enumerate(edges) if peer != PROC_NULL), key=lambda j: edges[j])


def _by_rank(parts: Sequence[Array], edges: Sequence[Edge], comm: Communicator, dtype: Any) -> tuple[Array, list[int]]:
    """Returns what goes to all ranks, one after the other, and how much to each."""
    order = _order(edges)
    sends = [sum(parts[j].size for j in order if edges[j][0] == peer) for peer in range(comm.size)]
    return np.concatenate([np.zeros(0, dtype), *(parts[j] for j in order)]).astype(dtype, copy=False), sends


def _request(request: Request | None) -> Request:
    assert request is not None
    return request


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()


def _alone() -> Communicator:
    (self_alone,) = Communicator.threads(1)
    worlds[self_alone.name] = [communicator.default().rank]
    return self_alone


COMM_TYPE_SHARED = 0
COMM_WORLD, COMM_SELF = Intracomm(communicator.default, "MPI_COMM_WORLD"), Intracomm(_alone, "MPI_COMM_SELF")
COMM_NULL = Intracomm(None, "MPI_COMM_NULL")
