"""ZeroThreeStandIn: ZeRO stage 3 for a plan of memory whose tensors have none. DeepSpeed need not be installed.

It holds the tensors that DeepSpeed holds, takes and frees them at the same moments, and calls the same collectives:

- weights, masters in fp32, gradients: a partition of each parameter, each kind in flat tensors for the whole run;
- a parameter is gathered before the module that it belongs to runs, forward and backward, and freed afterwards unless
  it is used again within `stage3_max_reuse_distance` elements; those of at most `stage3_param_persistence_threshold`
  elements stay gathered from one update to the next;
- parameters of the modules to come are gathered ahead, `stage3_prefetch_bucket_size` elements and not above
  `stage3_max_live_parameters`, in the order of the pass before. Several that are gathered together lie in one message
  first, and are copied out of it when the first of them is needed;
- gradients: copied into a bucket of `reduce_bucket_size` elements, which is scattered when it is full.

Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 5; DeepSpeed 0.19's documentation of
`zero_optimization` for the buckets and limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from trainwright.engine.zero_stand_ins import (
    ZeroSettings,
    ZeroStandIn,
    bytes_in_checkpoint,
    cast_to,
    count_host_bytes,
    count_nothing,
    new_master,
    prepare,
)


def make_zero_stand_in(plan: EnginePlan) -> DistributedEngine:
    """Makes the stand-in for the stage of ZeRO in a plan's configuration."""
    assert plan.deepspeed is not None
    is_third = deepspeed_config.get(plan.deepspeed.config, "zero_optimization.stage") == 3
    return ZeroThreeStandIn(plan) if is_third else ZeroStandIn(plan)


class ZeroThreeStandIn(DistributedEngine):
    """Holds the tensors of ZeRO stage 3, and makes the same exchanges."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._settings: ZeroSettings  # known with the model
        self._count: Count = count_nothing
        self._groups: list[SubGroup] = []
        self._partitions: list[torch.Tensor] = []  # of weights
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}  # partitions, views of one tensor
        self._bucket: torch.Tensor | None = None
        self._filled = 0
        self._waiting: list[tuple[nn.Parameter, torch.Tensor]] = []  # parameters and gradients that are not scattered
        self._numbers: dict[nn.Parameter, int] = {}  # in the order of the model
        self._live: LiveParameters | None = None

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        settings = ZeroSettings.from_plan(self._plan, model)
        self._settings = settings
        self.input_dtype = cast_to(model, settings.dtype)
        optimizer = make_optimizer(model)
        parameters = list(model.parameters())
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            made = [
                SubGroup(some, group=group, master=self._make_master(some))
                for some in in_sub_groups(trained, self._part_size, settings.sub_group)
            ]
            group["params"] = [one.master for one in made]
            self._groups += made
        prepare(optimizer, is_on_host=settings.offloads)
        trained = [parameter for group in self._groups for parameter in group.parameters]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for some in (trained, frozen):
            if some and self._world_size > 1:
                self._partitions.append(some[0].new_empty(sum(map(self._part_size, some)), requires_grad=False))
        self._take_gradients(trained)
        self._live = LiveParameters(model, settings, self._count_gathered, self._world_size)
        return model, optimizer

    def _make_master(self, parameters: list[nn.Parameter]) -> nn.Parameter:
        size = sum(map(self._part_size, parameters))
        return new_master(parameters[0], size, is_on_host=self._settings.offloads)

    def _take_gradients(self, trained: list[nn.Parameter]) -> None:
        if not trained:
            return
        self._bucket = trained[0].new_empty(self._settings.bucket, requires_grad=False)
        device = torch.device("meta") if self._settings.offloads else trained[0].device
        whole = trained[0].new_empty(sum(map(self._part_size, trained)), requires_grad=False, device=device)
        start = 0
        for parameter in trained:
            self._gradients[parameter] = whole.narrow(0, start, self._part_size(parameter))
            start += self._part_size(parameter)
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _part_size(self, parameter: nn.Parameter) -> int:
        return -(-parameter.numel() // self._world_size)

    def _count_gathered(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        self._count(tensors, kind)

    def show_buffers(self, count: Count) -> None:
        self._count = count
        count(self._partitions, "weights")
        count([group.master for group in self._groups], "masters")
        count(self._gradients.values(), "gradients")
        if self._bucket is not None:
            count([self._bucket], "communication")

    @property
    def settles_in(self) -> int:
        return 1  # what is gathered ahead is known from the pass before

    def saved_bytes(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
        sizes = [(group.master, sum(one.numel() for one in group.parameters)) for group in self._groups]
        counts = [len(group.parameters) for group in self._groups]
        return bytes_in_checkpoint(model, optimizer, sizes, counts)

    def host_bytes(self, optimizer: Optimizer) -> int:
        if not self._settings.offloads:
            return 0
        gradients = sum(one.numel() * one.element_size() for one in self._gradients.values())
        return gradients + count_host_bytes(optimizer, [group.master for group in self._groups])

    # -- a step --------------------------------------------------------------------------------------------------------

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # the weights have the type already

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None) -> None:
        loss = loss * (1.0 if gradient is None else gradient)
        loss.backward()  # type: ignore[no-untyped-call]
        self._scatter_bucket()
        assert self._live is not None
        self._live.end_backward()

    def _take(self, parameter: nn.Parameter) -> None:
        """Takes the gradient of a parameter when the backward pass has made it."""
        assert parameter.grad is not None
        assert self._bucket is not None
        size = parameter.numel()
        if self._filled and self._filled + size > self._settings.bucket:
            self._scatter_bucket()
        gradient = parameter.grad.reshape(-1)
        if self._filled + size <= self._settings.bucket:
            place = self._bucket.narrow(0, self._filled, size)
            place.copy_(gradient)
            gradient = place
        parameter.grad = None
        self._waiting.append((parameter, gradient))
        self._filled += size

    def _scatter_bucket(self) -> None:
        """Sums the gradients in the bucket up, each part in the process that updates it."""
        if not self._waiting:
            return
        self._waiting.sort(key=lambda one: self._numbers[one[0]])
        sizes = [self._part_size(parameter) for parameter, _ in self._waiting]
        total = sum(sizes)
        first = self._waiting[0][1]
        is_one = len(self._waiting) == 1 and first.numel() == total * self._world_size
        if self._settings.scatters:
            message = first if is_one else first.new_empty(total * self._world_size)
            part = message.narrow(0, dist.get_rank() * total, total)
            copied = message.clone() if self.device.type == "cpu" else None  # gloo sums a copy up
            dist.reduce_scatter_tensor(part, message)
            del copied
        else:
            assert self._bucket is not None
            message = self._bucket.narrow(0, 0, self._filled) if self._filled <= self._settings.bucket else first
            part = message.narrow(0, 0, total)
            dist.all_reduce(message)
        if not self._settings.offloads:
            start = 0
            for (parameter, _), size in zip(self._waiting, sizes, strict=True):
                self._gradients[parameter].copy_(part.narrow(0, start, size))
                start += size
        self._waiting.clear()
        self._filled = 0

    # -- the update ----------------------------------------------------------------------------------------------------

    @property
    def updates_in_clip(self) -> bool:
        return True

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        assert self._live is not None
        self._live.free_all()
        if self._settings.checks_overflow:
            dist.all_reduce(self._waiting_flag(), op=dist.ReduceOp.MAX)
        norms = [self._measure_norm(group) for group in self._groups]
        groups = self._optimizer.param_groups
        for group in self._groups:
            pieces = [self._gradients[parameter] for parameter in group.parameters]
            gradient = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).float()
            self._count([gradient], "gradients")
            group.master.grad = gradient
            if self._settings.max_norm > 0:
                gradient.mul_(1.0)
            del gradient
            self._optimizer.param_groups = [{**group.group, "params": [group.master]}]
            self._optimizer.step()
            self._optimizer.param_groups = groups
            group.master.grad = None
        self._live.gather_persistent()
        return torch.stack(norms).square().sum().sqrt()

    def _waiting_flag(self) -> torch.Tensor:
        assert self._bucket is not None
        return self._bucket.new_zeros(1, dtype=torch.uint8)

    def _measure_norm(self, group: SubGroup) -> torch.Tensor:
        """Returns the norm of the gradients of a group, measured in double precision, one after the other."""
        if self._settings.offloads:  # measured in host memory
            assert self._bucket is not None
            norm = self._bucket.new_zeros((), dtype=torch.float32)
            dist.all_reduce(norm)
            return norm
        norms = [torch.linalg.vector_norm(self._gradients[one].double()) for one in group.parameters]
        norm = torch.stack(norms).square().sum()
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
        for group in self._groups:
            group.master.grad = None


@dataclass(frozen=True, slots=True, kw_only=False)
class SubGroup:
    """Parameters that are updated together."""

    parameters: list[nn.Parameter]
    group: dict[str, Any] = field(kw_only=True)  # the optimizer's group that they are from
    master: nn.Parameter = field(kw_only=True)  # this process's partition of them in fp32, flat


def in_sub_groups(
    parameters: list[nn.Parameter], find_size: Callable[[nn.Parameter], int], limit: int
) -> Iterator[list[nn.Parameter]]:
    """Yields parameters that are updated together: a sub-group is full when its partition has so many elements."""
    some: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        some.append(parameter)
        size += find_size(parameter)
        if size >= limit:
            yield some
            some = []
            size = 0
    if some:
        yield some


# -- parameters that are gathered --------------------------------------------------------------------------------------


class Message:
    """Parameters that are gathered together: they lie in one tensor until the first of them is needed."""

    def __init__(self, parameters: list[nn.Parameter], num_processes: int, count: Count) -> None:
        self.parameters = parameters
        self._count = count
        self._is_read = False
        self._tensor: torch.Tensor | None = None
        if len(parameters) == 1:  # gathered into its own memory
            (alone,) = parameters
            self._allocate()
            flat = alone.detach().reshape(-1)
            size = alone.numel() // num_processes
            whole = flat.narrow(0, 0, size * num_processes) if size else alone.new_empty(num_processes)
        else:
            size = sum(-(-one.numel() // num_processes) for one in parameters)
            whole = parameters[0].new_empty(size * num_processes, requires_grad=False)
            self._tensor = whole
        size = whole.numel() // num_processes
        with torch.no_grad():
            dist.all_gather_into_tensor(whole, whole.narrow(0, dist.get_rank() * size, size))
        if self._tensor is None:
            self._count(parameters, "gathered")

    def read(self) -> None:
        """Copies the parameters out of the message."""
        if not self._is_read and self._tensor is not None:
            self._allocate()
        self._is_read = True

    def _allocate(self) -> None:
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        self._count(self.parameters, "gathered")


class LiveParameters:
    """Gathers the parameters of a model when its modules need them, and frees them.

    Args:
        model: whose modules get hooks.
        settings: limits.
        count: is told of gathered parameters.
        num_processes: that share the parameters; with one of them nothing is gathered.
    """

    def __init__(self, model: nn.Module, settings: ZeroSettings, count: Count, num_processes: int) -> None:
        self._settings = settings
        self._count = count
        self._num_processes = num_processes
        self._model = model
        self._numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._own = {module: list(dict.fromkeys(module.parameters(recurse=False))) for module in model.modules()}
        self._persistent = [one for one in model.parameters() if one.numel() <= settings.persistence]
        self._always = set(self._persistent)
        self._is_gathered = set(self._persistent)
        self._messages: dict[nn.Parameter, Message] = {}  # of parameters that are not read yet
        self._users: dict[nn.Parameter, set[nn.Module]] = {parameter: set() for parameter in self._numbers}
        self._num_live = 0  # elements
        self._order: list[nn.Module] = []  # of the pass before, once for each time that a module is needed
        self._seen: list[nn.Module] = []  # of this pass
        self._queue: deque[tuple[nn.Parameter, int]] = deque()  # to be gathered ahead, and the place in the order
        self._fetched_for: dict[nn.Parameter, int] = {}  # parameter -> the latest place that it was gathered for
        self._inputs_left: dict[nn.Module, int] = {}
        self._in_backward: set[nn.Module] = set()  # modules that the backward pass has entered and not left
        if num_processes == 1:
            return
        for parameter in self._numbers:
            if parameter not in self._is_gathered:
                parameter.untyped_storage().resize_(0)
        model.register_forward_pre_hook(self._begin_pass)
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    def free_all(self) -> None:
        """Frees all parameters before an update."""
        if self._num_processes > 1:
            for parameter in self._numbers:
                self._messages.pop(parameter, None)
                self._free(parameter)

    def gather_persistent(self) -> None:
        """Gathers the small parameters again, after an update."""
        if self._num_processes > 1:
            for parameter in self._persistent:
                Message([parameter], self._num_processes, self._count)
                self._is_gathered.add(parameter)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _begin_pass(self, module: nn.Module, inputs: Any) -> None:
        self._order = self._seen
        self._seen = []
        trace = [(one, place) for place, used in enumerate(self._order) for one in self._sorted(self._own[used])]
        self._queue = deque(trace)
        self._fetched_for = {}
        self._num_live = 0
        self._inputs_left = {}

    def _before_forward(self, module: nn.Module, inputs: Any) -> Any:
        self._fetch(module)
        self._inputs_left[module] = 0

        def after_backward() -> None:
            self._inputs_left[module] -= 1
            if self._inputs_left[module] == 0:
                self._release(module)

        def marked(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                self._inputs_left[module] += 1
            return with_call(tensor, after_backward)

        return tuple(map_own_tensors(marked, value) for value in inputs)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._release(module)
        return map_own_tensors(lambda tensor: with_call(tensor, lambda: self._before_backward(module)), output)

    def _before_backward(self, module: nn.Module) -> None:
        self._in_backward.add(module)
        self._fetch(module)

    def end_backward(self) -> None:
        """Frees the parameters of modules that the backward pass did not leave: none of their inputs has a gradient."""
        for module in self._in_backward:
            for parameter in self._own[module]:
                self._users[parameter].discard(module)
                if parameter not in self._always and not self._users[parameter]:
                    self._free(parameter)
        self._in_backward.clear()

    # -- gathering -----------------------------------------------------------------------------------------------------

    def _fetch(self, module: nn.Module) -> None:
        place = len(self._seen)
        self._seen.append(module)
        own = self._own[module]
        self._gather([one for one in own if one not in self._is_gathered and one not in self._messages])
        for parameter in own:
            self._users[parameter].add(module)
            message = self._messages.pop(parameter, None)
            if message is not None:
                message.read()
                self._is_gathered.update(message.parameters)
        self._look_ahead(own, place)

    def _look_ahead(self, own: list[nn.Parameter], place: int) -> None:
        num_new = sum(self._fetched_for.get(one, -1) < place for one in own)
        passed: set[nn.Parameter] = set()
        while self._queue and len(passed) < num_new:
            parameter, used_at = self._queue.popleft()
            self._fetched_for[parameter] = used_at
            passed.add(parameter)
        room = min(self._settings.max_live - self._num_live, self._settings.prefetch)
        ahead: dict[nn.Parameter, None] = {}  # a list would compare values
        size = 0
        while self._queue and size < room:
            parameter, used_at = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, -1), used_at)
            if parameter in self._is_gathered or parameter in self._messages or parameter in ahead:
                continue
            ahead[parameter] = None
            size += parameter.numel()
        self._gather(list(ahead))

    def _gather(self, parameters: list[nn.Parameter]) -> None:
        if parameters:
            message = Message(self._sorted(parameters), self._num_processes, self._count)
            self._messages |= dict.fromkeys(parameters, message)
            self._num_live += sum(one.numel() for one in parameters)

    def _release(self, module: nn.Module) -> None:
        """Frees the parameters of a module, except those that are used again soon."""
        place = len(self._seen)
        self._in_backward.discard(module)
        stays = {one for one in self._own[module] if self._fetched_for.get(one, -1) > place}
        stays.update(self._always)
        passed = 0
        for later in self._order[place:]:
            if passed >= self._settings.reuse_distance:
                break
            stays.update(self._own[later])
            passed += sum(one.numel() for one in self._own[later])
        for parameter in self._own[module]:
            self._users[parameter].discard(module)
            if parameter not in stays and not self._users[parameter]:
                self._free(parameter)

    def _free(self, parameter: nn.Parameter) -> None:
        self._users[parameter].clear()
        if parameter in self._is_gathered:
            self._is_gathered.discard(parameter)
            parameter.untyped_storage().resize_(0)
            self._num_live -= parameter.numel()

    def _sorted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return sorted(parameters, key=lambda one: self._numbers[one])


class _Call(torch.autograd.Function):
    """The tensor itself, with a call when the backward pass comes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


def with_call(tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """Returns a view of a tensor; `call` is called in the backward pass before its gradient goes on."""
    if not tensor.requires_grad:
        return tensor
    found: torch.Tensor = _Call.apply(tensor, call)  # type: ignore[no-untyped-call]
    return found


def map_own_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to the tensors in a module's inputs or outputs; mappings are changed in place."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map_own_tensors(change, one) for one in value)
    if isinstance(value, list):
        return [map_own_tensors(change, one) for one in value]
    if isinstance(value, dict):
        for name, one in list(value.items()):
            value[name] = map_own_tensors(change, one)
    return value
