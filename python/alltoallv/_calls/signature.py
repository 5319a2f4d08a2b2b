"""How functions of the front ends look from outside: signatures, and in the words that help() shows what they do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from inspect import cleandoc
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, overload

from alltoallv._calls.counts import Counts, Unit

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")  # the framework's tensor
G = TypeVar("G")  # its groups
G_contra = TypeVar("G_contra", contravariant=True)
H_co = TypeVar("H_co", covariant=True)  # its handles

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class ExchangeOptions(TypedDict, Generic[A, G], total=False):
        """The keyword arguments of `all_to_all_v` except ``async_op``, which decides the type of the result."""

        sdispls: Counts | None
        rdispls: Counts | None
        unit: Unit | None
        out: A | None
        group: G
        timeout: float | None

    class AllToAllV(Protocol[A, G_contra, H_co]):
        """The type of `all_to_all_v`: with ``async_op=True`` it returns a handle, too."""

        @overload
        def __call__(
            self,
            input: A,
            send_counts: Counts,
            recv_counts: Counts | None = None,
            *,
            async_op: Literal[False] = False,
            **options: Unpack[ExchangeOptions[A, G_contra]],
        ) -> A: ...
        @overload
        def __call__(
            self,
            input: A,
            send_counts: Counts,
            recv_counts: Counts | None = None,
            *,
            async_op: Literal[True],
            **options: Unpack[ExchangeOptions[A, G_contra]],
        ) -> tuple[A | None, H_co]: ...


def described(by: Callable[..., object]) -> Callable[[F], F]:
    """Gives a function the docstring of another with the same meaning."""

    def describe(function: F) -> F:
        function.__doc__ = by.__doc__
        return function

    return describe


def publish(package: dict[str, Any], **types: str) -> None:
    """Gives the functions that a package offers its name as their module, and signatures in its framework's types.

    dir() and with it tab completion then show what the package offers, and not the modules inside it.

    Args:
        package: The package's ``globals()``, with ``__all__``.
        types: What signatures show for the type variables ``A`` (tensors), ``G`` (groups) and ``H`` (handles).
    """
    package["__dir__"] = lambda: [*package["__all__"], *(name for name in package if name.startswith("__"))]
    for name in package["__all__"]:
        function = package[name]
        if isinstance(function, FunctionType):
            function.__module__, function.__qualname__ = package["__name__"], name
            for variable, shown in types.items():
                for argument, type in function.__annotations__.items():
                    function.__annotations__[argument] = re.sub(rf"\b{variable}\b", shown, type)


RAISES = """\
Raises:
    AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
        disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError)."""


def ending(returns: str = "", **arguments: str) -> Callable[[F], F]:
    """Ends the docstrings of functions that share their last arguments and errors, and what they return if they do."""

    def describe(function: F) -> F:
        text, _, own = cleandoc(function.__doc__ or "").partition("\n\nReturns:\n")
        lines = [text] if "\nArgs:\n" in text else [text, "\nArgs:"]
        for name in inspect.signature(function).parameters:
            if name in arguments and f" {name}: " not in text:
                lines.append(f"    {name}: {arguments[name]}")
        function.__doc__ = "\n".join([*lines, "\nReturns:", own or f"    {returns}", f"\n{RAISES}\n"])
        return function

    return describe


def all_to_all_v() -> None:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r::

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: A tensor (in NumPy an array) of any shape and any dense dtype; taken flat, or by rows of dimension 0.
            Copied first if it is not contiguous.
        send_counts, recv_counts: One integer >= 0 per rank: a list, tuple, array or integer tensor. ``send_counts`` of
            rank i for j and ``recv_counts`` of rank j for i must agree. ``recv_counts=None`` learns them from the
            peers; the output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Packed, ``send_counts`` cover the
            whole input; with ``sdispls`` send regions may overlap and leave gaps. Receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0; None: rows of an input of
            2 dimensions or more, elements of others.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero. In torch
            and Paddle it cannot be given for an input that wants a gradient.
        capacity: In torch, for npu tensors, without the arguments ``rdispls``, ``out``, ``async_op``, ``timeout``: how
            many units this rank can receive. Counts then stay on the device, as int64 tensors there, and the host does
            not wait for them: they may change in a captured graph. ``recv_counts`` are only compared with what comes.
            The result is a `alltoallv.torch.Received`, whose ``check()`` raises what is raised at once elsewhere, also
            on every rank. Only where the kernels in Ascend C serve (docs/ascend.md), else BackendUnavailableError on
            every rank; with ``sdispls`` not differentiable.
        group: A group of the framework (in torch a ProcessGroup, in MindSpore a name), a `Communicator`, or None for
            all ranks.
        async_op: Return ``(output, handle)`` at once. With learnt counts the output is not known yet:
            ``(None, handle)``, and ``handle.result()`` returns it.
        timeout: Seconds to wait for the peers of tensors in host memory; default: the communicator's. In MindSpore and
            Paddle it also holds for the gradient's exchange; in torch it cannot be given for an input that wants one.

    Returns:
        ``out`` if given, else a new tensor: of one dimension if counts are elements; if they are rows, with the other
        dimensions of the input. In torch, Paddle, and MindSpore's PyNative mode it is differentiable, to any order: the
        gradient is the exchange with sends and receives swapped.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """


def exchange_counts() -> None:
    """Returns what every rank will send to this one: entry j is rank j's ``send_counts`` entry for this rank.

    Args:
        send_counts: One integer >= 0 per rank.
        group: See `all_to_all_v`.

    Returns:
        int64, shape ``[W]``, on the CPU; None on a rank outside the group.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """


def all_to_all_single() -> None:
    """Splits ``input`` along dimension 0, sends part j to rank j, and concatenates what arrives into ``output``.

    Signature and meaning are those of ``torch.distributed.all_to_all_single``.

    Args:
        output: Shape ``[sum(output_split_sizes), ...]``; contiguous, of the input's dtype, apart from it in memory.
        input: Shape ``[sum(input_split_sizes), ...]``, any dtype.
        output_split_sizes, input_split_sizes: Rows from and for every rank; by default equal parts, for which
            dimension 0 must divide.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``. No gradient passes through it in torch, as in torch.distributed;
        `alltoallv.torch.functional` has one with gradients, and so has MindSpore's PyNative mode here.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """


def all_gather_into_tensor() -> None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

    Signature and meaning are those of ``torch.distributed.all_gather_into_tensor``.

    Args:
        output_tensor: Contiguous, of W times the elements, in shape ``[W * x1, x2, ...]``, ``[W, x1, x2, ...]`` or any
            other.
        input_tensor: Shape ``[x1, x2, ...]``, one on all ranks, of one dtype; may be this rank's part of the output.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """


def global_scatter() -> None:
    """Sends every row to the rank of its expert. Differentiable where `all_to_all_v` is.

    Args:
        x: Rows sorted by rank, then by expert: ``local_count[e + j * E]`` rows for expert e of rank j.
            Shape ``[n, ...]``.
        local_count, global_count: ``W * E`` integers >= 0, entry ``e + j * E`` standing for expert e and rank j: rows
            that go from here to expert e of rank j, and rows that come from rank j for expert e of this rank.
        group: See `all_to_all_v`.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this rank's expert, then by the rank they come from.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, also about the rows of one expert, or one
            is lost or late.
    """


def global_gather() -> None:
    """Brings the rows of `global_scatter` back to the ranks that sent them: its inverse, as differentiable.

    Args:
        x: Rows sorted by this rank's expert, then by rank. Shape ``[sum(global_count), ...]``.
        local_count, global_count, group: See `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the rank they come from, then by that rank's expert.

    Raises:
        AllToAllVError: as `global_scatter`.
    """
