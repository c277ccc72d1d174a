"""ZeroStandIn: ZeRO stages 1 and 2 for a plan of memory whose tensors have none. DeepSpeed need not be installed.

DeepSpeed reads the memory of parameters when its engine is made. This engine holds the same tensors, takes and frees
them at the same moments, and calls the same collectives:

- weights: flat, one tensor for each parameter group, of which the parameters are views;
- masters: a copy in fp32 of this process's partition of them, on which the optimizer works, also in full precision;
- gradients: copied into a bucket of `reduce_bucket_size` elements (two with `overlap_comm`), which is summed up over
  the processes when it is full. Stage 2 does it during the backward pass and keeps those of its partition, stage 1
  keeps all until the last micro-batch;
- the update: the gradients of the partition as one flat tensor, then the weights of all partitions are gathered.

Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 5, for what is partitioned; DeepSpeed 0.19's
documentation of `zero_optimization` for the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright._types import Optimizer
from trainwright.config import deepspeed_config
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, Count, MakeOptimizer
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.precision import DTYPES
from trainwright.errors import ArgumentError
from trainwright.support.tensor_tree import iterate_tensors

BUCKET = 500_000_000  # elements, DeepSpeed's default
PERSISTENCE = 100_000  # likewise
PREFETCH = 50_000_000
FAR = 1_000_000_000
FP32_BYTES = 4
ALIGNED = 2  # a flat group is a multiple of this many elements for each process


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """What a configuration of DeepSpeed says about memory and communication, with DeepSpeed's defaults."""

    stage: int
    dtype: torch.dtype  # of weights, gradients and messages
    bucket: int  # elements of a bucket of gradients
    overlaps: bool  # a second bucket is filled while the first one is on its way
    scatters: bool  # gradients are summed up by slices, one for each process that needs them
    max_norm: float  # 0: gradients are not clipped
    checks_overflow: bool
    persistence: int  # elements of the largest parameter that stays gathered (stage 3)
    prefetch: int  # elements that are gathered ahead (stage 3)
    max_live: int  # elements that may be gathered at a time before nothing more is gathered ahead (stage 3)
    reuse_distance: int  # elements of modules within which a parameter that is used again stays gathered (stage 3)
    sub_group: int  # elements of a partition that are updated together (stage 3)
    accumulates: bool  # a step has several micro-batches
    offloads: bool  # masters, optimizer states and their gradients are in host memory

    @classmethod
    def from_plan(cls, plan: EnginePlan, model: nn.Module) -> ZeroSettings:
        """Reads the configuration of a plan; ArgumentError for one whose memory is not known."""
        assert plan.deepspeed is not None
        config = deepspeed_config.filled_in(plan.deepspeed.config, model, num_steps=0, num_warmup_steps=0)

        def value(place: str, default: Any) -> Any:
            found = deepspeed_config.get(config, place)
            return default if found is None else found

        stage = int(value("zero_optimization.stage", 0))
        if value("optimizer.type", None) is not None:
            raise ArgumentError(
                "An optimizer in the DeepSpeed configuration cannot be planned. Leave its section out for the plan, "
                "and say optim=... instead, such as 'adamw_torch'."
            )
        if value("zero_optimization.offload_param.device", "none") != "none":
            raise ArgumentError(
                "zero_optimization.offload_param cannot be planned. Leave it out: the plan says how much the partition "
                "of the weights takes, which then is in host memory."
            )
        if value("zero_optimization.contiguous_gradients", True) is False:
            raise ArgumentError(
                "zero_optimization.contiguous_gradients=false cannot be planned. Leave it out for the plan: the "
                "default takes one bucket more and fragments less."
            )
        dtype = next((DTYPES[name] for name in DTYPES if value(f"{name}.enabled", False) is True), torch.float32)
        return cls(
            stage=stage,
            dtype=dtype,
            bucket=int(value("zero_optimization.reduce_bucket_size", BUCKET)),
            overlaps=bool(value("zero_optimization.overlap_comm", stage == 3)),
            scatters=bool(value("zero_optimization.reduce_scatter", True)),
            max_norm=float(value("gradient_clipping", 0.0)),
            checks_overflow=dtype is torch.float16
            or (stage < 3 and dtype is torch.bfloat16 and bool(value("bf16.check_grad_overflow", True))),
            persistence=int(value("zero_optimization.stage3_param_persistence_threshold", PERSISTENCE)),
            prefetch=int(value("zero_optimization.stage3_prefetch_bucket_size", PREFETCH)),
            max_live=int(float(value("zero_optimization.stage3_max_live_parameters", FAR))),
            reuse_distance=int(float(value("zero_optimization.stage3_max_reuse_distance", FAR))),
            sub_group=int(float(value("zero_optimization.sub_group_size", FAR))),
            accumulates=int(value("gradient_accumulation_steps", 1)) > 1,
            offloads=value("zero_optimization.offload_optimizer.device", "none") not in ("none", None),
        )


class FlatGroup:
    """The parameters of a group as one flat tensor, and this process's partition of it.

    Args:
        parameters: trained ones, which become views of the flat tensor.
        rank: this process.
        num_parts: processes.
        offloads: the master is in host memory.
    """

    def __init__(self, parameters: list[nn.Parameter], *, rank: int, num_parts: int, offloads: bool) -> None:
        self.parameters = parameters
        total = sum(parameter.numel() for parameter in parameters)
        unit = ALIGNED * num_parts
        self.whole = parameters[0].new_empty(-(-total // unit) * unit, requires_grad=False)
        self.part_size = self.whole.numel() // num_parts
        self.part = self.whole.narrow(0, rank * self.part_size, self.part_size)
        self.master = new_master(self.whole, self.part_size, is_on_host=offloads)
        self._rank = rank
        self._places: dict[nn.Parameter, int] = {}
        offset = 0
        for parameter in parameters:
            self._places[parameter] = offset
            parameter.data = self.whole.narrow(0, offset, parameter.numel()).view(parameter.shape)
            offset += parameter.numel()

    def slices(self, parameter: nn.Parameter) -> Iterator[tuple[int, int]]:
        """Yields the processes that have a part of a parameter, and the elements that each of them has."""
        start = self._places[parameter]
        end = start + parameter.numel()
        while start < end:
            owner = start // self.part_size
            stop = min(end, (owner + 1) * self.part_size)
            yield owner, stop - start
            start = stop

    @property
    def in_part(self) -> list[nn.Parameter]:
        """The parameters of which this process updates at least a part."""
        return [one for one in self.parameters if any(owner == self._rank for owner, _ in self.slices(one))]

    def pieces(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the gradients of the partition, for those of `in_part`, filled up with zeros at its end."""
        found = []
        for parameter, gradient in zip(self.in_part, gradients, strict=True):
            start = 0
            for owner, size in self.slices(parameter):
                if owner == self._rank:
                    found.append(gradient.reshape(-1).narrow(0, start, size))
                start += size
        missing = self.part_size - sum(piece.numel() for piece in found)
        return [*found, self.master.new_zeros(missing, dtype=self.whole.dtype)] if missing else found


class ZeroStandIn(DistributedEngine):
    """Holds the tensors of ZeRO stages 1 and 2, and makes the same exchanges."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._settings: ZeroSettings  # known with the model
        self._groups: list[FlatGroup] = []
        self._group_of: dict[nn.Parameter, FlatGroup] = {}
        self._count: Count = count_nothing
        self._is_boundary = True  # this micro-batch is the last one of the window
        self._buckets: list[torch.Tensor] = []
        self._filled = 0  # elements in the bucket
        self._waiting: list[nn.Parameter] = []  # whose gradients are in the bucket
        self._reduced: dict[nn.Parameter, torch.Tensor] = {}  # gradients of this micro-batch
        self._on_the_way: torch.Tensor | None = None  # a gradient on its way to host memory
        self._kept: torch.Tensor | None = None  # memory of those of the partition
        self._num_kept = 0
        self._sums: dict[int, list[torch.Tensor]] = {}  # gradients of the partition over micro-batches, by group

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        self._settings = ZeroSettings.from_plan(self._plan, model)
        self.input_dtype = cast_to(model, self._settings.dtype)
        optimizer = make_optimizer(model)
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            flat = FlatGroup(
                trained, rank=dist.get_rank(), num_parts=self._world_size, offloads=self._settings.offloads
            )
            self._groups.append(flat)
            self._group_of |= dict.fromkeys(trained, flat)
            group["params"] = [flat.master]
        prepare(optimizer, is_on_host=self._settings.offloads)
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        if self._settings.offloads:
            self._on_the_way = self._groups[0].whole.new_empty(self._largest)
        return model, optimizer

    @property
    def _largest(self) -> int:
        return max(parameter.numel() for parameter in self._group_of)

    def show_buffers(self, count: Count) -> None:
        self._count = count
        count([flat.whole for flat in self._groups], "weights")
        count([flat.master for flat in self._groups], "masters")
        if self._on_the_way is not None:
            count([self._on_the_way], "communication")

    def saved_bytes(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
        sizes = [(flat.master, sum(one.numel() for one in flat.parameters)) for flat in self._groups]
        return bytes_in_checkpoint(model, optimizer, sizes, [len(flat.parameters) for flat in self._groups])

    def host_bytes(self, optimizer: Optimizer) -> int:
        if not self._settings.offloads:
            return 0
        copied = self._largest + sum(flat.part_size for flat in self._groups)  # elements on their way
        if self._settings.accumulates:
            copied += sum(parameter.numel() for flat in self._groups for parameter in flat.in_part)
        copied *= self._groups[0].whole.element_size()
        return copied + count_host_bytes(optimizer, [flat.master for flat in self._groups])

    # -- a step --------------------------------------------------------------------------------------------------------

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # the weights have the type already

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        self._is_boundary = sync
        return NO_CONTEXT

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None) -> None:
        loss = loss * (1.0 if gradient is None else gradient)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._settings.stage == 1:
            if not self._is_boundary:
                return
            for parameter in self._group_of:
                if parameter.grad is not None:
                    self._put_into_bucket(parameter)
        self._finish_backward()

    def _take(self, parameter: nn.Parameter) -> None:
        """Takes the gradient of a parameter when the backward pass has made it."""
        self._open_buckets()
        if self._settings.stage == 2:
            self._put_into_bucket(parameter)

    def _open_buckets(self) -> None:
        if not self._buckets:
            first = self._groups[0].whole
            self._buckets = [first.new_empty(self._settings.bucket) for _ in range(1 + self._settings.overlaps)]
            self._count(self._buckets, "communication")

    def _put_into_bucket(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        size = parameter.numel()
        if self._filled + size > self._settings.bucket:
            self._reduce_bucket()
            self._buckets.reverse()
        if size > self._settings.bucket:  # such a gradient is reduced where it is
            gradient = parameter.grad.reshape(-1)
            self._reduced[parameter] = gradient.clone() if self._settings.offloads else gradient
        else:
            place = self._buckets[0].narrow(0, self._filled, size)
            place.copy_(parameter.grad.reshape(-1))
            self._reduced[parameter] = place
        parameter.grad = None
        self._filled += size
        self._waiting.append(parameter)

    def _reduce_bucket(self) -> None:
        """Sums the gradients in the bucket up over the processes, and keeps those that this process needs."""
        if not self._waiting:
            return
        if self._filled > self._settings.bucket:
            (alone,) = self._waiting
            tensor = self._reduced[alone]
        else:
            tensor = self._buckets[0].narrow(0, 0, self._filled)
        self._sum_up(tensor)
        for parameter in self._waiting:
            if self._settings.offloads:
                gradient = self._reduced.pop(parameter)
                if self._is_boundary and self._is_in_part(parameter):
                    torch.linalg.vector_norm(gradient.double())  # before it goes to host memory
            elif self._is_in_part(parameter):
                self._reduced[parameter] = self._keep(self._reduced[parameter])
            elif self._settings.stage == 2:
                del self._reduced[parameter]
        self._waiting.clear()
        self._filled = 0

    def _sum_up(self, tensor: torch.Tensor) -> None:
        if not self._settings.scatters:
            dist.all_reduce(tensor)
            return
        slices: list[tuple[int, int]] = []
        for parameter in self._waiting:
            for owner, size in self._group_of[parameter].slices(parameter):
                if slices and slices[-1][0] == owner:
                    slices[-1] = owner, slices[-1][1] + size
                else:
                    slices.append((owner, size))
        together: list[torch.Tensor] = []
        start = 0
        for number, (_, size) in enumerate(slices, start=1):
            together.append(tensor.narrow(0, start, size))
            start += size
            if sum(one.numel() for one in together) > self._settings.bucket or number == len(slices):
                message = together[0] if len(together) == 1 else torch.cat(together)
                self._count([message], "gradients" if len(together) == 1 else "communication")
                dist.all_reduce(message)
                together.clear()

    def _is_in_part(self, parameter: nn.Parameter) -> bool:
        return any(owner == dist.get_rank() for owner, _ in self._group_of[parameter].slices(parameter))

    def _keep(self, gradient: torch.Tensor) -> torch.Tensor:
        """Copies a gradient out of the bucket, next to the others of the partition."""
        if self._kept is None:
            total = sum(parameter.numel() for flat in self._groups for parameter in flat.in_part)
            self._kept = gradient.new_empty(total)
            self._num_kept = 0
            self._count([self._kept], "gradients")
        place = self._kept.narrow(0, self._num_kept, gradient.numel())
        place.copy_(gradient)
        self._num_kept += gradient.numel()
        return place

    def _finish_backward(self) -> None:
        self._reduce_bucket()
        for number, flat in enumerate([] if self._settings.offloads else self._groups):
            new = [
                self._reduced[parameter] if parameter in self._reduced else torch.zeros_like(parameter).reshape(-1)
                for parameter in flat.in_part
            ]
            if number not in self._sums:
                self._sums[number] = new
                continue
            for summed, one in zip(self._sums[number], new, strict=True):
                summed.add_(one)
        self._buckets = []
        self._reduced = {}
        self._kept = None

    # -- the update ----------------------------------------------------------------------------------------------------

    @property
    def updates_in_clip(self) -> bool:
        return True

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        if self._settings.checks_overflow:
            dist.all_reduce(self._groups[0].whole.new_zeros(1, dtype=torch.uint8), op=dist.ReduceOp.MAX)
        norms = [self._measure_norm(number) for number in range(len(self._groups))]
        groups = self._optimizer.param_groups
        for number, flat in enumerate(self._groups):
            if not self._settings.offloads:
                self._set_gradient(number, flat)
            self._optimizer.param_groups = [groups[number]]
            self._optimizer.step()
            self._optimizer.param_groups = groups
            flat.master.grad = None
            if not self._settings.offloads:
                with torch.no_grad():
                    flat.part.copy_(flat.master)
        if self._world_size > 1:
            for flat in self._groups:
                dist.all_gather_into_tensor(flat.whole, flat.part)
        return torch.stack(norms).square().sum().sqrt()

    def _set_gradient(self, number: int, flat: FlatGroup) -> None:
        """Gives the master of a group the gradients of its partition as one tensor."""
        pieces = flat.pieces(self._sums.pop(number))
        gradient = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).float()
        self._count([gradient], "gradients")
        flat.master.grad = gradient
        del pieces
        if self._settings.max_norm > 0:
            gradient.mul_(1.0)

    def _measure_norm(self, number: int) -> torch.Tensor:
        """Returns the norm of the gradients of a group, measured in double precision, one after the other."""
        if self._settings.offloads:  # measured in host memory
            norm = self._groups[number].whole.new_zeros((), dtype=torch.float32)
            dist.all_reduce(norm)
            return norm
        norms = [torch.linalg.vector_norm(one.double()) for one in self._groups[number].pieces(self._sums[number])]
        norm = torch.stack(norms).square().sum().float()
        dist.all_reduce(norm)
        return norm.sqrt()

    def measure_norm(self, model: nn.Module) -> torch.Tensor:
        return self.clip(model, torch.inf)

    def step(self, optimizer: Optimizer) -> bool:
        return True  # `clip` has updated

    def zero_grad(self, model: nn.Module) -> None:
        """Clears gradients that were set from outside; those of a step are gone by then."""
        for parameter in model.parameters():
            parameter.grad = None
        for flat in self._groups:
            flat.master.grad = None


def cast_to(model: nn.Module, dtype: torch.dtype) -> torch.dtype | None:
    """Gives parameters and buffers of a model the type that ZeRO trains in; returns it, None in full precision."""
    if dtype is torch.float32:
        return None
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return dtype


def new_master(like: torch.Tensor, size: int, *, is_on_host: bool) -> nn.Parameter:
    """Returns a flat copy in fp32; one in host memory is on another device, which a plan of a device does not see."""
    device = torch.device("meta") if is_on_host else like.device
    return nn.Parameter(like.new_empty(size, dtype=torch.float32, requires_grad=False, device=device))


def prepare(optimizer: Optimizer, *, is_on_host: bool) -> None:
    """Makes an optimizer of masters take steps without a backward pass; fused ones know no host memory of a plan."""
    optimizer.register_step_pre_hook(fill_missing)
    for group in optimizer.param_groups if is_on_host else ():
        if group.get("fused"):
            group["fused"] = False


def fill_missing(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Gives masters a gradient where a step is made before any backward pass, so that their states exist."""
    for group in optimizer.param_groups:
        for master in group["params"]:
            if master.grad is None:
                master.grad = torch.zeros_like(master)


def bytes_in_checkpoint(
    model: nn.Module, optimizer: Optimizer, sizes: list[tuple[nn.Parameter, int]], counts: list[int]
) -> tuple[int, int]:
    """Returns the bytes of weights and of optimizer states in a checkpoint, which has them whole and in fp32.

    Args:
        model: its buffers are saved as they are.
        optimizer: has states of this process's partitions.
        sizes: masters, and elements of the whole parameters that each has a partition of.
        counts: parameters of each, which have a copy of the states that are not tensors of their shape.
    """
    weights = sum(FP32_BYTES * one.numel() for one in model.parameters())
    weights += sum(one.numel() * one.element_size() for one in model.buffers())
    states = 0
    for (master, size), count in zip(sizes, counts, strict=True):
        for state in iterate_tensors([optimizer.state.get(master, {})]):
            is_spread = state.numel() == master.numel()
            states += state.element_size() * (size if is_spread else count)
    return weights, states


def count_host_bytes(optimizer: Optimizer, masters: list[nn.Parameter]) -> int:
    """Returns the bytes of masters, their gradients and states in host memory."""
    size = sum(2 * FP32_BYTES * master.numel() for master in masters)
    for master in masters:
        size += sum(one.numel() * one.element_size() for one in iterate_tensors([optimizer.state.get(master, {})]))
    return size


def count_nothing(tensors: Iterable[torch.Tensor], kind: str) -> None:
    """Counts nothing: no plan looks."""
