"""The dispatchers of all front ends share this code: whole layers, in chunks that overlap, with shared experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from alltoallv._calls import experts
from alltoallv._calls.adapters import A
from alltoallv._calls.guard import guard
from alltoallv._calls.in_step import in_step
from alltoallv._calls.routing import Load, Routing, chunk_ends
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerLostError

T = TypeVar("T")
OPERATOR = "all_to_all_v"  # the operator by which rows travel


class Pending(Generic[T]):
    """A dispatch or combine under way. All ranks ask for the results in the order in which they began."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Any = None

    def result(self) -> T:
        """Waits, and returns what the call returns."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        result: T = self._result
        return result


@dataclass(eq=False)
class DispatchState(Generic[A]):
    """Holds the way back of a dispatch, and what came with its rows: lists and arrays, in torch tensors.

    Attributes:
        counts: Rows of every local expert, those of zeros that fill it up included.
        received: Rows of every local expert that came from tokens.
        weights: Gate weight of every row, shape ``[rows]``; None if none were given.
        experts: Local expert of every row, int64, shape ``[rows]``, ascending.
        sources: Rank that every row comes from, int64, shape ``[rows]``; ascending within an expert, -1 of zeros.
        chosen, kept: How often this rank's tokens chose every expert, and how many rows it sent to each; int64 of shape
            ``[num_experts]``.
        scales: Scale of every row, float32, shape ``[rows]``, where rows come as codes; else None.
        route: The way of every row; for `combine` and for a dispatch of other tokens by the same way.
    """

    counts: Any
    received: Any
    weights: A | None
    experts: Any
    sources: Any
    chosen: Any
    kept: Any
    route: Any
    scales: A | None = None


Dispatched = tuple[Any, Any, DispatchState[A]]


class Dispatching(ABC, Generic[A]):
    """Runs whole layers with the `begin_dispatch` and `begin_combine` that a front end defines."""

    routing: Routing
    group: Any
    origin: Communicator | None = None  # of a dispatcher of survivors: the group before the first loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets help() of a front end's class say what its options mean."""
        super().__init_subclass__(**kwargs)
        if cls.__doc__ and (text := Routing.__doc__):
            options = text[text.rindex("\n", 0, text.index("capacity:")) :].rstrip()
            cls.__doc__ = cls.__doc__.replace(" See `alltoallv._calls.routing.Routing`.", options)

    @abstractmethod
    def member(self) -> Communicator:
        """This rank in the dispatcher's group, in host memory."""

    def carrier(self, tokens: A) -> Any:
        """Returns the communicator that carries these tokens."""
        return self.member()

    @abstractmethod
    def begin_dispatch(
        self, tokens: A, expert_ids: A, gate_weights: A | None, begins: bool
    ) -> Callable[[], Dispatched[A]]:
        """Sends tokens; the function that it returns receives rows. ``begins`` moves them in the background."""

    @abstractmethod
    def begin_combine(
        self, expert_outputs: A, state: DispatchState[A], begins: bool, whole: bool = False
    ) -> Callable[[], A]:
        """Sends rows back; the function that it returns receives tokens. ``begins`` moves them in the background.

        ``whole``: in one piece. Several in the background need `in_step`, which waits for all ranks.
        """

    @abstractmethod
    def parts(self, tokens: A, ends: Sequence[int]) -> list[A]:
        """Splits the rows at ``ends``; the parts are views where the framework has them."""

    @abstractmethod
    def joined(self, parts: Sequence[A]) -> A:
        """Concatenates the rows of all parts."""

    @property
    def num_experts(self) -> int:
        """Returns the number of experts on all ranks together."""
        return self.routing.num_experts

    @property
    def local_experts(self) -> Sequence[int]:
        """Returns the numbers of this rank's experts."""
        comm = self.member()
        return self.routing.placed(comm.size)[comm.rank]

    def load(self, state: DispatchState[A]) -> Load:
        """Returns how the tokens of all ranks were divided among the experts in the dispatch that returned ``state``.

        Collective. ``load.kept.max() / load.kept.mean()`` says how uneven the work is.
        """
        mine = np.concatenate([np.asarray(state.chosen), np.asarray(state.kept)])
        return Load(*experts.gathered(self.member(), mine).sum(0).reshape(2, -1))

    def layer(
        self,
        tokens: A,
        expert_ids: A,
        gate_weights: A | None,
        functions: Sequence[Callable[[A], A]] | Callable[[A, Any], A],
        shared: Callable[[A], A] | None,
        chunks: int,
    ) -> A:
        """Runs the layer; see the dispatchers' ``__call__``."""
        comm = self.carrier(tokens)
        with guard(comm, OPERATOR):
            if isinstance(functions, Sized) and len(functions) != len(self.local_experts):
                raise InvalidParamError(
                    f"experts has {len(functions)} entries, expected {len(self.local_experts)}, one per local expert"
                )
            ends = chunk_ends(len(tokens), chunks)
            given: Any = [None if x is None else self.parts(x, ends) for x in (tokens, expert_ids, gate_weights)]

        def begin(chunk: int, begins: bool) -> Callable[[], Dispatched[A]]:
            x, ids, weights = (part and part[chunk] for part in given)
            return self.begin_dispatch(x, ids, weights, begins)

        beside: Any = None
        with in_step(comm, chunks):
            arriving, failed = [begin(0, chunks > 1 or shared is not None)], None
            try:
                beside = None if shared is None else shared(tokens)  # while the first rows are under way
            except Exception as error:  # raised where they have arrived, as on the peers
                failed = error
            leaving: list[Callable[[], A]] = []
            try:
                for chunk in range(chunks):
                    if chunk + 1 < chunks:
                        arriving.append(begin(chunk + 1, True))
                    rows, counts, state = arriving[chunk]()
                    with guard(comm, OPERATOR):
                        if failed is not None:
                            raise failed
                        outputs = self._outputs_of(functions, rows, counts)
                    leaving.append(self.begin_combine(outputs, state, chunks > 1))
            except AllToAllVError:
                for finish in leaving[: max(chunk - 1, 0)]:  # these left earlier: did they fail first?
                    finish()
                raise
            combined = [finish() for finish in leaving]
        result = combined[0] if chunks == 1 else self.joined(combined)
        if shared is not None:
            result = result + beside
        return result

    def _outputs_of(self, functions: Any, rows: A, counts: Any) -> A:
        if not isinstance(functions, Iterable):
            both: A = functions(rows, counts)
            return both
        parts = self.parts(rows, np.cumsum(counts).tolist())
        made = [function(part) for function, part in zip(functions, parts, strict=True)]
        return self.joined(made) if made else rows

    def survivors(self: T) -> T:
        """Returns a dispatcher of the ranks that are left after one was lost; they keep the experts that they have.

        Collective among them; `alltoallv.Communicator.shrink` makes their communicator, which is its ``group``. The
        experts of lost ranks are lost: pairs that choose them are dropped from then on, so that a token gets the sum
        over its other choices. Their weights are not divided anew. A rank that dies meanwhile is left out, too; where
        it has died too late for that, the next call raises `PeerLostError`, and `survivors` of this dispatcher agrees
        on the smaller set. The communicator of the first dispatcher must not be destroyed before.

        Raises:
            BackendUnavailableError: the group is not one of shared memory.
            CommTimeoutError: a rank that lives did not call.
        """
        this: Any = self
        # Some see a rank that dies now before their dispatcher is made, others later; therefore all shrink one group.
        origin, mine = this.origin or this.member(), [*this.local_experts]
        while True:
            left = origin.shrink()
            try:
                gathered = experts.gathered(left, mine + [-1] * (this.num_experts - len(mine)))
                break
            except PeerLostError:
                continue
        placement = tuple(tuple(e for e in row if e >= 0) for row in gathered.tolist())
        made: Any = type(this)(group=left, **asdict(this.routing) | {"placement": placement})
        made.origin = origin
        return made  # type: ignore[no-any-return]
