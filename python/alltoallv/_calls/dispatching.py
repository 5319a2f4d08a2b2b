"""The dispatcher of all front ends: tokens to their experts and back by the core, and whole layers in chunks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import experts, messages
from alltoallv._calls.adapters import A
from alltoallv._calls.experts import Load, Routing, RoutingOptions, chunk_ends
from alltoallv._calls.guard import guard, lockstep
from alltoallv.communicator import Communicator
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerLostError, PeerMismatchError

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
Array = npt.NDArray[Any]
Route = tuple[Any, Any, Any, Any]  # order, source, ranks and token of a dispatch; see op_host/moe/routing.h
OPERATOR = "all_to_all_v"  # the operator by which rows travel
WEIGHED = ("float32", "float16", "bfloat16")  # dtypes of rows and weights that the core multiplies


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
    """Holds the way back of a dispatch, and what came with its rows.

    Attributes:
        counts: Rows of every local expert, including the zeros that fill it up; in a graph of torch a tensor.
        received: Rows of every local expert that came from tokens.
        weights: Gate weight of every row, shape ``[rows]``, in torch and MindSpore differentiable; None if none were
            given.
        scales: Scale of every row, float32, shape ``[rows]``, where rows come as codes; else None.
        ids: The experts that this rank's tokens chose, ``[n, k]``.
        way: Where every pair of a token and an expert went: four arrays of integers.
        num_experts: Experts on all ranks together.
        communicator: Of the ranks that dispatched; None in a graph of torch.
    """

    counts: Any
    received: Any
    weights: A | None
    scales: A | None
    ids: Any
    route: Route
    num_experts: int
    communicator: Any

    @property
    def experts(self) -> Any:
        """Local expert of every row: int64, shape ``[rows]``, ascending."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def sources(self) -> Any:
        """Rank that every row comes from: int64, shape ``[rows]``; ascending within an expert, -1 for rows of zeros."""
        _, source, ranks, _ = self.route
        return np.append(np.repeat(np.arange(ranks.shape[1]), ranks[1]), -1)[source]

    @property
    def chosen(self) -> Any:
        """The times that this rank's tokens chose each expert: int64, shape ``[num_experts]``."""
        return np.bincount(self.ids.reshape(-1), minlength=self.num_experts)

    @property
    def kept(self) -> Any:
        """The rows that this rank sent to each expert: int64, shape ``[num_experts]``."""
        return np.bincount(self.ids.reshape(-1)[self.route[0]], minlength=self.num_experts)


Dispatched = tuple[Any, Any, DispatchState[A]]


def begin_dispatch(
    adapter: Any,
    comm: Communicator,
    routing: Routing,
    tokens: Any,
    ids: Any,
    weights: Any,
    wide: Callable[[Any], Array],
    likes: Any,
    begins: bool,
) -> Callable[[], Any]:
    """Sends tokens in host memory; the result returns what `_core.moe_dispatch` returns.

    ``wide``: Returns weights as an array of float64.
    """
    try:
        call = _core.moe_dispatch(adapter, comm.core, routing.core, tokens, ids, weights, wide, likes, begins)
    except PeerMismatchError as error:
        raise named(comm, error, agreed_terms(routing, tokens, weights)) from None
    if not begins:
        return lambda: call

    def finish() -> Any:
        try:
            return call.finish()
        except PeerMismatchError as error:
            raise named(comm, error, agreed_terms(routing, tokens, weights)) from None

    return finish


def _wide(weights: Array) -> Array:
    return np.asarray(weights, np.float64)


def agreed_terms(routing: Routing, tokens: Any, weights: Any) -> dict[str, str]:
    """Returns what all ranks agree on in a dispatch; as text: a capacity of 1, rows, is not one of 1.0, a factor."""
    dtypes = f"{tokens.dtype} {tuple(tokens.shape[1:])}, gate_weights {None if weights is None else weights.dtype}"
    options = {name: repr(value) for name, value in asdict(routing).items()}
    return {"tokens of": dtypes.replace("torch.", ""), **options}


def named(comm: Any, error: PeerMismatchError, terms: dict[str, str]) -> PeerMismatchError:
    """Returns the error that names what differs of what all ranks tell, where the core found on all that terms do."""
    if not isinstance(comm, Communicator) or comm.host_core is None or "or options" not in str(error):
        return error
    every = list[dict[str, str]]()
    with contextlib.suppress(AllToAllVError):  # a rank is elsewhere
        every = messages.all_gather(comm, dict(terms))(-1.0)
    for rank, name in ((rank, name) for rank, options in enumerate(every) for name in options):
        if every[rank][name] != every[0][name]:
            text = f"rank 0 has {name} {every[0][name]}, rank {rank} has {name} {every[rank][name]}"
            return PeerMismatchError(f"{str(error).partition(': ')[0]}: {text}", id=3028)
    return error


def sum_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    return np.result_type(np.float32, *dtypes)


def added(terms: Any, wide: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """Returns the sums of terms ``[n, k, ...]`` over k, in order, in a wider dtype; the core adds the usual ones."""
    total = convert(terms[:, 0], wide)
    for choice in range(1, terms.shape[1]):
        total = total + convert(terms[:, choice], wide)
    return convert(total, terms.dtype)


def collect(
    adapter: Any, comm: Communicator, rows: Array, weights: Array | None, route: Route, n: int, k: int, **options: Any
) -> Callable[[], tuple[Array, Array | None]]:
    """Brings rows and weights of arrays back; the result returns tokens ``[n, ...]`` and weights ``[n, k]``.

    ``options``: other arguments of `_core.moe_collect`.
    """
    call = _core.moe_collect(adapter, comm.core, rows, weights, options.pop("gates", None), route, n, k, **options)

    def finish() -> tuple[Array, Array | None]:
        tokens, of_tokens, sums = call.finish() if options.get("begins") else call
        if not sums:
            tokens = added(tokens, sum_dtype(tokens.dtype), np.ndarray.astype)
        return tokens, of_tokens

    return finish


def check_state(state: Any, kind: type) -> None:
    """Raises InvalidParamError if this is not the state of a dispatch."""
    if not isinstance(state, kind):
        raise InvalidParamError(f"state is of type {type(state).__name__}, expected what dispatch returned", id=1490)


class Dispatching(ABC, Generic[A]):
    """The dispatcher, whose tensors a front end shows as arrays of NumPy, or which it moves itself."""

    adapter: Any = None  # by which the core reads what `array` returns, beside plain arrays
    routing: Routing
    group: Any = None
    active_ranks: Any = None  # see `RoutingOptions`
    # Of a dispatcher of survivors: the group before the first loss, and its ranks that are left.
    origin: Communicator | None = None
    ranks: Sequence[int] | None = None

    def __init__(self, num_experts: int, group: Any = None, **options: Unpack[RoutingOptions]) -> None:
        if unknown := sorted(options.keys() - RoutingOptions.__annotations__.keys()):
            names = ", ".join(sorted(RoutingOptions.__annotations__))
            raise TypeError(f"{type(self).__name__}() has no argument {unknown[0]!r}, expected some of {names}")
        self.active_ranks = options.pop("active_ranks", None)
        self.routing, self.group = Routing(num_experts, **options), group
        self._last = self.routing  # of the last call

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets help() of a front end's class describe what its options mean."""
        super().__init_subclass__(**kwargs)
        if cls.__doc__ and (text := RoutingOptions.__doc__):
            options = text[text.rindex("\n", 0, text.index("capacity:")) :].rstrip()
            cls.__doc__ = cls.__doc__.replace(" See `RoutingOptions`.", options)

    @abstractmethod
    def member(self) -> Communicator:
        """This rank in the dispatcher's group, in host memory."""

    def carrier(self, tokens: A) -> Any:
        """Returns the communicator that carries these tokens."""
        return self.member()

    def array(self, name: str, x: Any) -> Array:
        """Returns the values of an argument as a NumPy array, if this is a framework of arrays."""
        raise NotImplementedError

    def arrived(
        self, tokens: Any, gate_weights: Any, rows: Array, weights: Array | None, state: DispatchState[Any]
    ) -> Dispatched[A]:
        """Returns what a dispatch returns once rows and weights have arrived; ``state`` has no weights yet.

        This, like `combined`, is for a framework of arrays without gradients.
        """
        state.weights = weights
        return rows, state.counts, state

    def weighted(self, expert_outputs: Any, state: DispatchState[A]) -> tuple[Any, Array | None]:
        """Multiplies each row by its weight in float32 or the wider dtype, rounded to the dtype of the rows.

        Or it returns the rows unchanged, with the weights by which they are still to be multiplied.
        """
        raise NotImplementedError

    def combined(self, rows: A, state: DispatchState[A], tokens: Array) -> A:
        """Returns what a combine of these rows returns once its tokens have arrived."""
        return cast("A", tokens)

    def current_routing(self) -> Routing:
        """Returns the options of the present call."""
        if self.active_ranks is None:
            return self.routing
        self._last = self._last.serving(self.active_ranks, self.ranks)
        return self._last

    def dispatch(self, tokens: Any, expert_ids: Any, gate_weights: Any = None, *, async_op: bool = False) -> Any:
        """Sends every token to each of its k experts.

        Args:
            tokens: Shape ``[n, ...]``, n >= 0. dtype and row shape agree on all ranks; in torch floating-point or
                complex.
            expert_ids: Integers from 0 to ``num_experts - 1``, shape ``[n, k]``, or ``[n]`` for k = 1. k, as n, may
                differ between ranks; a token may name an expert twice. Or the state of an earlier dispatch, whose way
                these tokens then go; not as codes.
            gate_weights: Floating-point, shape of ``expert_ids``; None on all ranks: `combine` adds without weights.
            async_op: Return a `Pending` at once, whose ``result()`` is what is said below; not with a state, nor in a
                graph of torch.

        Returns:
            ``(rows, counts, state)``: the rows for this rank's experts, ``[sum(counts), ...]``, sorted by expert, then
            by the rank they come from, then as they lay there; how many each local expert gets, rows of zeros up to
            the alignment included; and what `combine` needs. In torch and MindSpore rows and
            ``state.weights`` are differentiable.

        Raises:
            InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
            PeerMismatchError: ranks disagree about the dtypes, the row shape, the number of experts or the options.
            PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come; see `survivors`.
        """
        if isinstance(expert_ids, DispatchState):
            return self.again(tokens, expert_ids, gate_weights)
        finish = self.begin_dispatch(tokens, expert_ids, gate_weights, async_op)
        return Pending(finish) if async_op else finish()

    def again(self, tokens: Any, state: DispatchState[A], gate_weights: Any) -> Dispatched[A]:
        """Sends other tokens by the way of an earlier dispatch."""
        comm = state.communicator
        with guard(comm, OPERATOR):
            x = self.array("tokens", tokens)
            weights = None if gate_weights is None else self.array("gate_weights", gate_weights)
        rows, received = _core.moe_spread(self.adapter, comm.core, x, weights, state.route)
        other: DispatchState[Any] = replace(state, weights=None, scales=None)
        return self.arrived(tokens, gate_weights, rows, received, other)

    def begin_dispatch(
        self, tokens: Any, expert_ids: Any, gate_weights: Any, begins: bool
    ) -> Callable[[], Dispatched[A]]:
        """Sends tokens; the function that it returns receives rows. ``begins`` moves them in the background."""
        comm, likes = self.member(), None
        with guard(comm, OPERATOR):
            x, ids = self.array("tokens", tokens), self.array("expert_ids", expert_ids)
            weights = None if gate_weights is None else self.array("gate_weights", gate_weights)
            routing = self.current_routing()
        if self.routing.code_dtype is not None:
            likes = np.empty(0, numpy_dtype(self.routing.code_dtype)), np.empty(0, np.float32)
        arguments = x, ids, weights, _wide
        arriving = begin_dispatch(self.adapter, comm, routing, *arguments, likes, begins)
        ids = np.array(ids, np.int64)  # a copy: the state keeps it

        def finish() -> Dispatched[A]:
            rows, of_rows, scales, *route, by_expert = arriving()
            counts, received = by_expert.tolist()
            numbers = ids.reshape(route[2][2:, comm.rank])
            fields = numbers, cast("Route", tuple(route)), self.num_experts, comm
            state: DispatchState[Any] = DispatchState(counts, received, None, scales, *fields)
            return self.arrived(tokens, gate_weights, rows, of_rows, state)

        return finish

    def combine(self, expert_outputs: Any, state: Any, *, async_op: bool = False) -> Any:
        """Brings the rows back to their tokens and adds the k results of each.

        A row is multiplied by its gate weight where it is, in float32 or the wider of the two dtypes, and rounded to
        the dtype of ``expert_outputs``. The k results of a token are added in the order of its choices, in float32 or
        wider, and rounded once; dropped ones count as zero.

        Args:
            expert_outputs: Shape ``[sum(counts), ...]``, in the order of the rows of `dispatch`. The row shape and the
                dtype may differ from the tokens', but not between ranks.
            state: What `dispatch` returned.
            async_op: Return a `Pending` at once, whose ``result()`` is the tokens; not in a graph of torch. The same on
                all ranks.

        Returns:
            Shape ``[n, ...]``, in the order of the tokens given to `dispatch`. In torch and MindSpore differentiable.

        Raises:
            The errors of `dispatch`.
        """
        if not isinstance(state, DispatchState):  # which knows the communicator of all other checks
            with guard(self.carrier(expert_outputs), OPERATOR):
                check_state(state, DispatchState)
        finish = self.begin_combine(expert_outputs, state, async_op, single=async_op)
        return Pending(finish) if async_op else finish()

    def begin_combine(self, expert_outputs: Any, state: Any, begins: bool, single: bool = False) -> Callable[[], A]:
        """Sends rows back; the function that it returns receives tokens. ``begins`` moves them in the background.

        ``single``: in one piece. Several in the background need `lockstep`, which waits for all ranks.
        """
        comm = state.communicator
        with guard(comm, OPERATOR):
            rows, gates = self.weighted(expert_outputs, state)
            array = self.array("expert_outputs", rows)
        payload = self.routing.combine_payload or ""
        terms: Any = {"gates": gates, "payload": payload, "undivided": single, "begins": begins}
        arriving = collect(self.adapter, comm, array, None, state.route, *state.ids.shape, **terms)
        return lambda: self.combined(rows, state, arriving()[0])

    def __call__(
        self,
        tokens: Any,
        expert_ids: Any,
        gate_weights: Any,
        experts: Sequence[Callable[[A], A]] | Callable[[A, Any], A],
        *,
        shared: Callable[[A], A] | None = None,
        chunks: int = 1,
    ) -> A:
        """Runs `dispatch`, every local expert on its rows, and `combine`.

        Args:
            tokens, expert_ids, gate_weights: See `dispatch`.
            experts: This rank's, in the order of `local_experts`; each maps ``[rows, ...]`` to ``[rows, ...]``, also
                zero rows. A rank without experts gets no rows, but needs the shape and dtype of its peers' results:
                there, the results must be like the tokens. Or one function of the rows and counts of all local experts,
                which is what can be in a graph of torch, where ``chunks`` is 1.
            shared: An expert of all tokens, which every rank has; it works while rows are under way, and what it makes
                is added to the result.
            chunks: Parts of the tokens, as many on all ranks: while experts work on one, the next one arrives and the
                last one leaves. A capacity holds in every part.

        Returns:
            The tokens, as `combine` returns them.
        """
        return self.layer(tokens, expert_ids, gate_weights, experts, shared, chunks)

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

        Collective. ``load.kept.max() / load.kept.mean()`` states how uneven the work is.
        """
        own_counts = np.concatenate([np.asarray(state.chosen), np.asarray(state.kept)])
        return Load(*experts.gathered(self.member(), own_counts).sum(0).reshape(2, -1))

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
                    f"experts has {len(functions)} entries, expected {len(self.local_experts)}, one per local expert",
                    id=1128,
                )
            ends = chunk_ends(len(tokens), chunks)
            parts: Any = [None if x is None else self.parts(x, ends) for x in (tokens, expert_ids, gate_weights)]

        def begin(chunk: int, begins: bool) -> Callable[[], Dispatched[A]]:
            x, ids, weights = (part and part[chunk] for part in parts)
            return self.begin_dispatch(x, ids, weights, begins)

        shared_output: Any = None
        with lockstep(comm, chunks):
            arriving, failed = [begin(0, chunks > 1 or shared is not None)], None
            try:
                shared_output = None if shared is None else shared(tokens)  # while the first rows are under way
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
            result = result + shared_output
        return result

    def _outputs_of(self, functions: Any, rows: A, counts: Any) -> A:
        if not isinstance(functions, Iterable):
            both: A = functions(rows, counts)
            return both
        parts = self.parts(rows, np.cumsum(counts).tolist())
        outputs = [function(part) for function, part in zip(functions, parts, strict=True)]
        return self.joined(outputs) if outputs else rows

    def survivors(self: T) -> T:
        """Returns a dispatcher of the ranks that are left after one was lost; they keep the experts that they have.

        Collective among them; `alltoallv.Communicator.shrink` makes their communicator, which is its ``group``. The
        experts of lost ranks are lost: pairs that choose them are dropped from then on, so that a token gets the sum
        over its other choices. Their weights are not divided anew. ``active_ranks`` keeps an entry for every rank that
        there was, and the entries of lost ranks become False. A rank that dies meanwhile is also left out; where
        it has died too late for that, the next call raises `PeerLostError`, and `survivors` of this dispatcher agrees
        on the smaller set. The communicator of the first dispatcher must not be destroyed before.

        Raises:
            BackendUnavailableError: the group is not one of shared memory.
            CommTimeoutError: a rank that lives did not call.
        """
        this: Any = self
        # Some see a rank that dies now before their dispatcher is made, others later; therefore all shrink one group.
        origin, own_experts = this.origin or this.member(), [*this.local_experts]
        while True:
            left = origin.shrink()
            try:
                own = [origin.rank, *own_experts, *[-1] * (this.num_experts - len(own_experts))]
                gathered = experts.gathered(left, own).tolist()
                break
            except PeerLostError:
                continue
        changed: Any = {"placement": tuple(tuple(e for e in row if e >= 0) for _, *row in gathered)}
        changed["active_ranks"] = this.active_ranks
        dispatcher: Any = type(this)(group=left, **asdict(this.routing) | changed)
        dispatcher.origin, dispatcher.ranks = origin, [row[0] for row in gathered]
        if hasattr(this.active_ranks, "__setitem__"):
            for rank in sorted({*range(origin.size)} - {*dispatcher.ranks}):
                this.active_ranks[rank] = False
        return dispatcher  # type: ignore[no-any-return]
