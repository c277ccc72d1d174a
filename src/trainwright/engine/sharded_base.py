"""Engines with a part of the parameters in each process: their base, and tensor parallelism.

The base synchronizes gradients and gathers checkpoints. In tensor parallelism the model was sharded when it was loaded;
it communicates between the processes itself, and processes that share layers get the same batches.
"""

from __future__ import annotations

import logging
import re
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainwright._types import Optimizer, Prepared, StateDict
from trainwright.config.plans import EnginePlan, ParallelPlan
from trainwright.distributed import collectives
from trainwright.distributed.collectives import cpu_group
from trainwright.engine import sharded_state
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer, MakeScheduler
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.gradients import (
    clip_each_kind,
    measure_norm_each_kind,
    step_each_kind,
    with_gradients,
)
from trainwright.errors import ModelError
from trainwright.support.model_facts import core_model, plain_name, spans_replicas, uncompiled

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class ShardedEngine(DistributedEngine):
    """Base of engines that train a model with parameters sharded over the processes."""

    def __init__(self, plan: EnginePlan, accelerator: Accelerator) -> None:
        super().__init__(plan, accelerator)
        self._sharded: Any = None  # the module with the sharded parameters: nn.Module, and FSDPModule or not
        self._earlier = EarlierParameters()
        self._syncs = True

    @abstractmethod
    def _find_sharded(self, model: nn.Module) -> nn.Module | None:
        """Returns the module that holds the shards of a model; None: the model is whole."""

    def modules_that_wait(self, model: nn.Module) -> list[nn.Module] | None:
        units: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # Layers in parts and experts elsewhere exchange values within a layer; a compiled one runs no hooks of others.
        waits_within = self._num_together > 1 or has_shared_experts(model) or self._plan.compile.backend is not None
        return None if waits_within or not units else units

    def place(self, model: nn.Module) -> nn.Module:
        return model  # a device may have room for a shard only: a model is moved when it is sharded, or was before

    def setup(self, model: nn.Module, *, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> Prepared:
        # An optimizer of the parameters that a forward pass has left gathered would update copies.
        self._release(model)
        return super().setup(model, make_optimizer=make_optimizer, make_scheduler=make_scheduler)

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._sharded = model
        self._syncs = True
        super()._begin(model, optimizer)

    def _release(self, model: nn.Module) -> None:
        """Frees gathered parameters, and remembers their names for an optimizer that was made from them."""
        self._earlier.note(model)
        reshard(model)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync != self._syncs and not self._plan.ddp.sync_each_batch:
            if isinstance(self._sharded, FSDPModule):
                self._sharded.set_requires_gradient_sync(sync)
            self._syncs = sync
        return NO_CONTEXT

    def begin_epoch(self, model: nn.Module) -> None:
        reshard(self._sharded)

    @contextmanager
    def evaluating(self, *, keeps_outputs: bool) -> Iterator[None]:
        with super().evaluating(keeps_outputs=keeps_outputs):
            yield
        if self._sharded is not None:
            self._release(self._sharded)

    def _clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        self._walked = list(self._sharded.parameters())
        return clip_each_kind(with_gradients(self._walked), max_norm)

    def _measure(self, model: nn.Module) -> torch.Tensor:
        self._walked = list(self._sharded.parameters())
        return measure_norm_each_kind(with_gradients(self._walked))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return self._sharded is not None

    def whole_tensor(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        return sharded_state.whole_tensor(parameter, part)

    def take_tensor_part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return sharded_state.take_tensor_part(parameter, whole)

    def save_parts(self, folder: Path, optimizer: Optimizer | None, *, put: Callable[..., None]) -> None:
        reshard(self._sharded)
        sharded_state.save(folder, self._sharded, optimizer, put=put, group=cpu_group("background"))

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        sharded = self._find_sharded(model)
        if sharded is None:
            return None
        self._release(sharded)
        return sharded_state.whole_weights(sharded)

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        if (sharded := self._find_sharded(model)) is not None:
            self._release(sharded)
        return sharded_state.load_whole_weights(model if sharded is None else sharded, weights)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        return sharded_state.whole_optimizer_state(self._sharded, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict) -> None:
        sharded_state.load_whole_optimizer_state(self._sharded, optimizer, state)


class EarlierParameters:
    """Parameters that a model had before it was sharded, or while it was gathered, by name.

    An optimizer may have been made from them: before the first evaluation, or between two calls of the trainer. They
    are not kept alive.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None

    def note(self, model: nn.Module) -> None:
        """Remembers the names of the parameters that a model has now, and forgets those of another model."""
        module = uncompiled(model)
        if self._model() is not module:
            self._names = {}
            self._model = weakref.ref(module)
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = (weakref.ref(parameter), plain_name(name))

    def name(self, parameter: object) -> str | None:
        """Returns the name of a parameter that was noted."""
        reference, name = self._names.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None

    def exchange(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Gives an optimizer the parameters that a model has now in place of earlier ones."""
        with self.exchanged_gradients(optimizer, model):
            pass

    @contextmanager
    def exchanged_gradients(self, optimizer: Optimizer, model: nn.Module) -> Iterator[None]:
        """Gives an optimizer the parameters that a model has at the end of the context, in place of earlier ones.

        Within the context it holds none of the model's, so that sharding frees whole parameters one after the other.
        Parameters of other modules stay.
        """
        self.note(model)
        groups = optimizer.param_groups
        held = [[self.name(one) or one for one in group["params"]] for group in groups]
        for group in groups:
            group["params"] = []
        try:
            yield
        finally:
            reshard(model)
            current = {plain_name(name): parameter for name, parameter in model.named_parameters()}
            for group, members in zip(groups, held, strict=True):
                group["params"] = [current[one] if isinstance(one, str) else one for one in members]


def has_shared_experts(model: nn.Module) -> bool:
    """Returns True if processes share out the experts of a model, so that tokens travel."""
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return any("ep" in (mesh.mesh_dim_names or ()) for mesh in meshes)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that an evaluation has left gathered (FSDP 2), since no backward pass follows it."""
    for module in uncompiled(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class TensorParallelEngine(ShardedEngine):
    """Trains a model of which each process holds the shards that it has loaded."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.parallel is not None
        super().__init__(plan, make_accelerator(plan))
        self._parallel = plan.parallel
        self._apart: AbstractContextManager[Any] = NO_CONTEXT
        self._sums = False
        if plan.loaders.dispatch_batches:
            logger.warning(
                "accelerator_config.dispatch_batches=True has no effect with tensor parallelism, where several "
                "processes need the same batch: each process reads for itself."
            )

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(self.setup_for_evaluation(model))
        self._earlier.exchange(optimizer, model)
        step_each_kind(optimizer)
        return model, optimizer

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        super()._begin(model, optimizer)
        summed = summed_parameters(model)
        self._sums = bool(summed)
        own = [p for p in summed if not spans_replicas(p, self._parallel.tp)]
        self._apart = UnreducedGradients(own) if own else NO_CONTEXT

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        super().accumulate(model, sync=sync or self._sums)
        return self._apart

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        self._release(model)
        check_sharded_parameters(model, self._parallel)
        self._sharded = model
        return model

    def _find_sharded(self, model: nn.Module) -> nn.Module:
        return self.unwrap(model)

    @property
    def holds_parts(self) -> bool:
        return True

    @property
    def writes_parts(self) -> bool:
        return self._parallel.writes_parts

    @property
    def hides_weights(self) -> str | None:
        return "tensor parallelism may have parts of parts; use fsdp or DDP"  # a dimension sharded twice, with FSDP

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        # A process that has finished its text keeps calling the model, because all processes join each forward pass.
        return nullcontext({"synced_gpus": True})

    @property
    def dispatches(self) -> bool:
        return False  # processes that share layers need the same batch


class UnreducedGradients(AbstractContextManager[None]):
    """Sets the gradients of earlier micro-batches aside during a backward pass, and adds them up after it.

    In tensor parallelism each process computes a part of the gradient of some whole weights, such as the norms of the
    heads in Qwen3. Transformers sums a gradient over the processes after each backward pass. The gradients of
    earlier passes are in it, and were summed already: with accumulation they would count several times.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *error: object) -> None:
        for parameter, before in zip(self._parameters, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []


def summed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the whole weights of a model whose gradients transformers sums over the processes that share layers."""
    core = core_model(model)
    if getattr(core, "tp_size", None) in (None, 1):
        return []
    styles: Mapping[str, str] = getattr(core, "tp_plan", None) or {}
    names = {name for name, style in styles.items() if style == "replicated_with_grad_allreduce"}
    modules = [one for name, one in core.named_modules() if re.sub(r"\.\d+(?=\.|$)", ".*", name) in names]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


class EngineOfParts(TensorParallelEngine):
    """Trains a model in parts that also has weights which nothing averages over the replicas, as an adapter has.

    An adapter that was added after the model was sharded has whole weights, or, with tensor parallelism, parts that the
    replicas have alike. Each replica computes its own gradients of them, and so does each process that has a part of a
    sequence. They are averaged here in one exchange a step, after the last backward pass.
    """

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan)
        self._others: list[nn.Parameter] = []

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        check_adapter(model)
        for module in model.modules():
            if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
                # PEFT declares the size of the part, and transformers takes the whole size from here.
                module.out_features, module.in_features = module.weight.shape
        return super().setup_for_evaluation(model)

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        super()._begin(model, optimizer)
        self._others = [p for p in model.parameters() if not spans_replicas(p, self._parallel.tp)]
        with torch.no_grad():
            for parameter in self._others:
                self._have_alike(parameter)

    def _have_alike(self, parameter: nn.Parameter) -> None:
        """Gives all processes the values of the first one, or those that have the same part the first one's of them."""
        if isinstance(parameter, DTensor):
            dist.broadcast(parameter.to_local(), group=self._token_group, group_src=0)
        else:
            dist.broadcast(parameter.data, src=0)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        context = super().accumulate(model, sync=sync)
        return self._averaging(context) if sync or self._plan.ddp.sync_each_batch else context

    @contextmanager
    def _averaging(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Averages the gradients at the end of a context; a gradient that a replica lacks counts as zero there."""
        with context:
            yield
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._others:
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        for same in by_type.values():
            local = [local_gradient(parameter) for parameter in same]
            joined = torch.cat([gradient.flatten() for gradient in local])
            mean = collectives.total(joined, self._token_group) / (self._world_size // self._parallel.tp)
            means = torch.split_with_sizes(mean, [one.numel() for one in local])
            for gradient, own in zip(local, means, strict=True):
                gradient.copy_(own.view_as(gradient))


def check_adapter(model: nn.Module) -> None:
    """Raises ModelError for a low-rank adapter that PEFT cannot compute, or made for a part of a layer."""
    for name, module in model.named_modules():
        adapted = getattr(module, "parameter_name", None)  # set in an adapter on a parameter, such as experts have
        weight = getattr(module.get_base_layer(), adapted, None) if isinstance(adapted, str) else None
        if isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ()):
            raise ModelError(
                f"{name} adapts the weights of experts, which ep_size shares out, and PEFT can add to whole weights "
                "only. Name layers of the attention in target_modules, or load the model with fsdp_size alone."
            )
        base = getattr(module, "base_layer", None)
        if not isinstance(base, nn.Linear) or not isinstance(base.weight, DTensor):
            continue
        for adapter, first in getattr(module, "lora_A", {}).items():
            made = (module.lora_B[adapter].weight, first.weight)
            sizes = (made[0].shape[0], made[1].shape[1])
            if sizes != tuple(base.weight.shape) or not all(map(has_its_part, made)):
                raise ModelError(
                    f"The adapter {adapter!r} of {name} does not have the size of its layer, "
                    f"{tuple(base.weight.shape)}: PEFT takes that of a part where a model is loaded with tp_size and "
                    "fsdp_size, or with dp_replicate_size. Load the model with tp_size alone or fsdp_size alone."
                )


def has_its_part(weight: torch.Tensor) -> bool:
    """Returns whether this process has as much of a weight as the weight's own layout says."""
    if not isinstance(weight, DTensor):
        return True
    part = torch.empty(weight.shape, device="meta")
    for mesh_dim, placement in enumerate(weight.placements):
        if hasattr(placement, "dim"):
            parts = part.tensor_split(weight.device_mesh.size(mesh_dim), dim=placement.dim)
            part = parts[weight.device_mesh.get_local_rank(mesh_dim)]
    return weight.to_local().numel() == part.numel()


@torch.no_grad()
def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Returns this process's part of a gradient, a view of it; zero is set if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def check_sharded_parameters(model: nn.Module, parallel: ParallelPlan) -> None:
    """Raises ModelError if the model is not sharded, or if other trained weights would not have averaged gradients."""
    name = type(model).__name__
    if not any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        num_shards = parallel.num_in_all // parallel.tp  # those of a sequence are counted among them
        size = f"DistributedConfig(tp_size={parallel.tp}{f', fsdp_size={num_shards}' if num_shards > 1 else ''})"
        cure = f"Load it in parts: {name}.from_pretrained(..., distributed_config={size})."
        if not getattr(model, "supports_tp_plan", False):
            cure = (
                f"{name} has no plan for tensor parallelism: use fsdp, or take it apart yourself with "
                "torch.distributed.tensor.parallel.parallelize_module."
            )
        raise ModelError(f"parallelism_config.tp_size={parallel.tp}, and {name} is whole in each process. {cure}")
    beside = [n for n, p in model.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")]
    num_replicas = parallel.dp_replicate * parallel.dp_shard
    averages_others = parallel.has_others or parallel.num_per_sequence > 1
    if beside and num_replicas > 1 and not averages_others:
        raise ModelError(
            f"{len(beside)} trainable weights of {name} ({beside[0]}, ...) are not sharded over the {num_replicas} "
            "processes with data of their own: their gradients would not be averaged. Load the "
            "model with DistributedConfig(tp_size=..., fsdp_size=...)."
        )
