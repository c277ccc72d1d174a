"""Operations of the stand-in: by the CPU's kernels, on the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import streams
from .counts import COUNTS
from .device import BLOCKS, DEVICE, MEMORY, NAME, allocate, index_of, is_here, moved, on_device, twin_of, use_of
from .generators import drawing_from

WAITS = ("nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
# Operations that take positions and the like from the host, and copy them.
TAKE_FROM_HOST = ("index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index")

Twins: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an operation of which a tensor, or the device that was asked for, is on the stand-in."""
    if MEMORY.is_broken:
        raise torch.AcceleratorError(f"{NAME} error: device-side assert triggered")
    name = op._schema.name.partition("::")[2]
    special = SPECIAL.get(name)
    if special is not None:
        return special(op, *args, **kwargs)
    COUNTS.launches[name] += 1
    if name in WAITS:
        COUNTS.waits[name] += 1
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    values, spec = tree_flatten((args, kwargs))
    written = _written(op, args, kwargs)
    index = None if device is None else index_of(device)
    if index is None:
        index = next(value.device.index for value in values if is_here(value))
    stream = streams.current_stream()
    now = stream.tick()
    twins: Twins = {}  # id of a twin -> twin, and tensor on the device
    changed = []
    for value in values:
        if is_here(value):
            if value.device.index != index:
                raise RuntimeError(f"{name}: Expected all tensors on one device, found {NAME}:{index}, {value.device}")
            note_use(value, stream, now, writes=any(value is one for one in written), name=name)
            twin = twin_of(value)
            twins[id(twin)] = (twin, value)
            changed.append(twin)
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0 and name not in TAKE_FROM_HOST:
            raise RuntimeError(f"{name}: Expected all tensors on one device, found {NAME}:{index} and {value.device}")
        changed.append(value)
    host_args, host_kwargs = tree_unflatten(changed, spec)
    if _takes_device(op):
        host_kwargs["device"] = "cpu"
    with drawing_from(index, op):
        results = op(*host_args, **host_kwargs)
    _resize_outputs(twins)
    flat, spec = tree_flatten(results)
    flat = [_result(one, twins, index, stream, now) if isinstance(one, torch.Tensor) else one for one in flat]
    return tree_unflatten(flat, spec)


def _takes_device(op: Any) -> bool:
    return any(argument.name == "device" for argument in op._schema.arguments)


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation writes to."""
    found: list[Any] = []
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


def note_use(tensor: torch.Tensor, stream: streams.Stream, now: int, *, writes: bool, name: str) -> None:
    use = use_of(tensor)
    if use is not None:
        use.touch(stream, now, writes=writes, name=name)


def _result(result: torch.Tensor, twins: Twins, index: int, stream: streams.Stream, now: int) -> torch.Tensor:
    given = twins.get(id(result))
    if given is not None:
        return given[1]
    made = on_device(result, f"{NAME}:{index}")
    note_use(made, stream, now, writes=True, name="result")
    return made


def _resize_outputs(twins: Twins) -> None:
    """Gives outputs that a kernel resized memory of the device."""
    for twin, tensor in twins.values():
        if twin.shape != tensor.shape:
            tensor.data = on_device(twin, tensor.device)


# -- operations that the device does in its own way --------------------------------------------------------------------


def empty(
    op: Any, size: list[int], *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> Any:
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = list(torch.empty(size, memory_format=memory_format, device="meta").stride())
    return allocate(list(size), stride, dtype, device)


def empty_strided(
    op: Any, size: list[int], stride: list[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return allocate(list(size), list(stride), dtype, device)


def as_strided(op: Any, tensor: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    view = torch.ops.aten.alias(tensor)
    where = tensor.storage_offset() if offset is None else offset
    return torch.ops.aten.as_strided_(view, size, stride, where)


def view(op: Any, tensor: torch.Tensor, size: Any) -> Any:
    if isinstance(size, torch.dtype):
        return moved(twin_of(tensor).view(size), DEVICE, tensor.device.index or 0)
    shape = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(size)
    return as_strided(op, tensor, list(shape.shape), list(shape.stride()))


def reshape_alias(op: Any, tensor: torch.Tensor, size: list[int], stride: list[int]) -> Any:
    return as_strided(op, tensor, size, stride)


def unfold(op: Any, tensor: torch.Tensor, dimension: int, size: int, step: int) -> Any:
    shape = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").unfold(dimension, size, step)
    return as_strided(op, tensor, list(shape.shape), list(shape.stride()))


def resize(op: Any, tensor: torch.Tensor, size: list[int], *, memory_format: Any = None) -> torch.Tensor:
    if list(tensor.shape) != list(size):
        tensor.data = allocate(list(size), None, tensor.dtype, tensor.device)
    return tensor


def set_(
    op: Any, tensor: torch.Tensor, source: Any = None, offset: int = 0, size: Any = None, stride: Any = None
) -> Any:
    """Lets a tensor have the memory of a storage, which some tensor of the device has or had."""
    if source is None:
        tensor.data = allocate([0], None, tensor.dtype, tensor.device)
        return tensor
    if isinstance(source, torch.Tensor):
        tensor.data = source
        return tensor
    itemsize = tensor.dtype.itemsize
    size = [source.nbytes() // itemsize] if size is None else list(size)
    if stride is None or (not stride and size):
        stride = list(torch.empty(size, device="meta").stride())
    block = BLOCKS[source.data_ptr()]
    flat = moved(torch.frombuffer(block, dtype=tensor.dtype), DEVICE, tensor.device.index or 0)
    torch.ops.aten.as_strided_(flat, size, list(stride), offset)
    tensor.data = flat
    return tensor


def copy_from(op: Any, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    stream = streams.current_stream()
    now = stream.tick()
    if is_here(source) and is_here(target):
        COUNTS.launches["copy_"] += 1
        note_use(source, stream, now, writes=False, name="copy_")
        note_use(target, stream, now, writes=True, name="copy_")
        twin_of(target).copy_(twin_of(source))
        return target
    if is_here(target):
        COUNTS.to_device += 1
        COUNTS.pageable += source.dim() > 0 and not source.is_pinned()
        note_use(target, stream, now, writes=True, name="copy_")
        twin_of(target).copy_(source)
        return target
    COUNTS.to_host += 1
    note_use(source, stream, now, writes=False, name="copy_")
    if non_blocking and target.is_pinned():
        value = twin_of(source).clone()  # what it is then; a later operation of the stream may change it
        stream.on_their_way.append((now, functools.partial(target.copy_, value)))
        return target
    COUNTS.waits["copy to the host"] += 1
    stream.deliver(now)
    target.copy_(twin_of(source))
    return target


def local_scalar(op: Any, tensor: torch.Tensor) -> Any:
    COUNTS.waits["item"] += 1
    stream = streams.current_stream()
    note_use(tensor, stream, stream.tick(), writes=False, name="item")
    return twin_of(tensor).item()


def record_stream(op: Any, tensor: torch.Tensor, stream: Any) -> None:
    use = use_of(tensor)
    if use is not None:
        use.kept_for.add(stream.stream_id)


def attention_by_math(op: Any, *args: Any, **kwargs: Any) -> int:
    return 0


SPECIAL: dict[str, Callable[..., Any]] = {
    "empty": empty,
    "empty_strided": empty_strided,
    "as_strided": as_strided,
    "view": view,
    "_reshape_alias": reshape_alias,
    "unfold": unfold,
    "resize_": resize,
    "set_": set_,
    "_copy_from": copy_from,
    "_local_scalar_dense": local_scalar,
    "record_stream": record_stream,
    "_fused_sdp_choice": attention_by_math,
}
