"""Shows torch tensors to the core: contiguous memory of a known dtype, copied only where needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad

from alltoallv import _core
from alltoallv._calls.adapters import Region, not_contiguous, wrong_dtype
from alltoallv._calls.counts import Unit, rows_of
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager.observers import is_tracing

# If anybody wants to see more of a call than its result, the call takes the way through Python.
_core.add_torch(
    Tensor,
    torch.is_grad_enabled,
    (_profiler_enabled, torch._C._is_tracing, torch._C._len_torch_dispatch_stack),
    forward_ad,
)
Copies = list[tuple[Tensor, Tensor]]  # to, from
PLAIN = Tensor, torch.nn.Parameter  # classes that add no meaning to their elements
# The dtypes that travel, with the core's names.
MOVABLE = {dtype: name for name in _core.dtypes if isinstance(dtype := getattr(torch, name, None), torch.dtype)}


def as_plain(tensor: Tensor) -> Tensor:
    """Returns the tensor as one of torch's own class, with the same memory; one that wraps others stays as it is."""
    if type(tensor) in PLAIN or wraps(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def wraps(tensor: Tensor) -> bool:
    """Returns whether a tensor is of a class that stands for other tensors, which have the memory."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def core_name(dtype: torch.dtype) -> str:
    """Returns the core's name of a dtype.

    Raises:
        InvalidTensorError: a dtype that the core does not know, such as a quantized one.
    """
    try:
        return MOVABLE[dtype]
    except KeyError:
        raise InvalidTensorError(
            f"dtype is {dtype}, expected one of {', '.join(MOVABLE.values())}", 13, id=2092
        ) from None


def check_tensor(name: str, tensor: object) -> None:
    """Raises InvalidTensorError unless this is a dense tensor with data."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise InvalidTensorError(f"{name} has layout {tensor.layout}, expected torch.strided", 7, id=2114)
    # Forward-mode gradients may be zeros without memory.
    for kind, is_one in (("nested", tensor.is_nested), ("zero", tensor._is_zerotensor())):
        if is_one:
            raise InvalidTensorError(f"{name} is a {kind} tensor, expected one dense block of memory", 7, id=2115)
    if torch._C._is_tracing():
        raise InvalidTensorError(
            f"{name} is traced by torch.jit, which may drop the call: expected torch.compile or export", id=2116
        )
    if is_tracing():
        raise InvalidTensorError(
            f"{name} stands for other tensors (torch.export, make_fx, FakeTensorMode, torch.func), which this call "
            "does not know: expected one of the functions of alltoallv.torch",
            id=2117,
        )
    if wraps(tensor) and not hasattr(tensor, "trigger_wait"):  # results of torch's functional collectives have that
        kind = type(tensor).__name__
        raise InvalidTensorError(
            f"{name} is a {kind}, expected a tensor with its own memory, as to_local() returns", 5, id=2118
        )
    check_memory(name, tensor)
    if has_tangent(tensor):
        raise InvalidTensorError(f"{name} has a forward-mode gradient, which would be lost: expected none", id=2119)


def check_memory(name: str, tensor: Tensor) -> None:
    """Raises InvalidTensorError for a tensor in host memory without storage, or too little, as FSDP's between calls."""
    if not tensor.is_cpu or wraps(tensor) or not tensor.numel():
        return
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        raise InvalidTensorError(
            f"{name} is a batch of torch.func.vmap or is_grads_batched, expected each tensor by itself", id=2120
        ) from None
    if (tensor.storage_offset() + last + 1) * tensor.itemsize > nbytes:
        raise InvalidTensorError(
            f"{name} has {tensor.numel()} elements but a storage of {nbytes} bytes, expected memory for all", 7, id=2121
        )


def has_tangent(tensor: Tensor) -> bool:
    """Returns whether a tensor carries a forward-mode gradient."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def as_input(name: str, tensor: Tensor) -> Tensor:
    """Returns the values in contiguous memory; copies only if needed."""
    check_tensor(name, tensor)
    x = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return x.clone() if wraps(x) else x


def needs_grad(*tensors: object) -> bool:
    """Returns whether autograd records what is made of these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return False


def check_output(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises InvalidTensorError for a tensor that the operator cannot write into."""
    check_tensor(name, tensor)
    check_dtype(name, tensor, dtype)
    check_contiguous(name, tensor)


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raises InvalidTensorError for a tensor whose elements do not follow each other in memory."""
    if not is_contiguous(tensor):
        raise not_contiguous(name)


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises InvalidTensorError unless the tensor has this dtype."""
    if tensor.dtype != dtype:
        own_dtype, expected = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        raise wrong_dtype(name, own_dtype, expected)


def check_one_dtype(*tensors: Tensor) -> None:
    """Raises InvalidTensorError, in torch's words, if the tensors' dtypes differ."""
    _core.check_one_dtype([str(tensor.dtype) for tensor in tensors])


def region(tensor: Tensor) -> Region:
    """Returns where a contiguous tensor lies: its address and its length in bytes."""
    return tensor.data_ptr(), tensor.nbytes


def is_contiguous(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements follow each other in memory, as they are."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or wraps(tensor))


def output_of(tensor: Tensor, copies: Copies) -> Tensor:
    """Returns memory for an output: the tensor itself, or memory that is copied to it afterwards."""
    check_memory("tensor", tensor)
    if is_contiguous(tensor):
        return tensor.detach()
    space = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    copies.append((tensor, space))
    return space


def in_place(tensor: Tensor, copies: Copies) -> Tensor:
    """Returns memory that is input and output at once: the tensor itself, or a copy that is copied back."""
    if is_contiguous(tensor):
        check_memory("tensor", tensor)
        return tensor.detach()
    copy = as_input("tensor", tensor)
    copies.append((tensor, copy))
    return copy


def apart(inputs: list[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs; those that share memory with an output are copied."""
    regions = [(out.data_ptr(), out.data_ptr() + out.nbytes) for out in outputs if out.nbytes]
    low, high = min((a for a, _ in regions), default=0), max((b for _, b in regions), default=0)

    def meets(x: Tensor) -> bool:
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        return begin < high and low < end and any(begin < b and a < end for a, b in regions if begin < end)

    return [x.clone() if meets(x) else x for x in inputs]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts one after another in memory; no copy if they are, like the chunks of one tensor."""
    begins = accumulate((x.nbytes for x in parts), initial=parts[0].data_ptr())
    storages = {x.untyped_storage().data_ptr() for x in parts}
    if len(storages) > 1 or any(x.numel() and x.data_ptr() != begin for x, begin in zip(parts, begins, strict=False)):
        return torch.cat([x.reshape(-1) for x in parts])
    return parts[0].as_strided((sum(x.numel() for x in parts),), (1,))


def row_size(tensor: Tensor) -> int:
    """Returns the elements per row of dimension 0, in a way that torch.compile can trace."""
    rows_of(tensor.shape)
    return math.prod(tensor.shape[1:])


def reads_rows(unit: Unit | None, dimensions: int) -> bool:
    """Returns whether counts count rows, in a way that torch.compile can trace."""
    if unit not in ("element", "row", None):
        raise InvalidParamError(f"unit is {unit!r}, expected 'element', 'row' or None", id=1056)
    return dimensions > 1 if unit is None else unit == "row"


def from_block(block: _core.Block, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of that shape over a block, which lives as long as the tensor's storage."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return shaped(torch.frombuffer(block, dtype=dtype), shape)


def shaped(new: Tensor, shape: Sequence[int]) -> Tensor:
    """Gives a new contiguous tensor that shape. Not a view, which could not be changed in place with gradients."""
    if len(shape) == new.dim() == 1:
        return new
    return torch.empty(0, dtype=new.dtype, device=new.device).set_(new.untyped_storage(), 0, tuple(shape))


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new CPU tensor, not initialized, in this process's shared arena; in a graph an ordinary one.

    Its storage cannot grow in place (``resize_`` beyond its size raises); everything else works as with any tensor:
    pickling and ``deepcopy`` give ordinary tensors, forked DataLoader workers read it where it is, ``share_memory_``,
    which also sending it to a spawned process does, moves it to torch's own shared memory.
    """
    dtype = dtype or torch.get_default_dtype()
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(dims)
    if count == 0 or is_tracing() or torch._C._is_tracing():
        return torch.empty(dims, dtype=dtype, device="cpu")
    return from_block(_core.allocate(count * dtype.itemsize), dims, dtype)
