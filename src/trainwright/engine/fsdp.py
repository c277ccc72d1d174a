"""FSDP: parameters, gradients and optimizer states are sharded over the processes; one engine for each version.

Accelerate reads the settings and wraps the model. Gradients are averaged over processes, as in the other engines.
"""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._types import Model, Optimizer
from trainwright.config import fsdp_config
from trainwright.config.plans import EnginePlan
from trainwright.distributed.world import is_true
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer
from trainwright.engine.gradients import step_each_kind
from trainwright.engine.precision import as_fp32
from trainwright.engine.sharded_base import ShardedEngine
from trainwright.errors import ArgumentError, ModelError
from trainwright.support.model_facts import uncompiled

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

FLAGS_OF_VERSION_1 = {
    "forward_prefetch": False,
    "use_orig_params": True,
    "sync_module_states": True,
    "limit_all_gathers": True,
}


def make_fsdp_engine(plan: EnginePlan) -> FSDPEngine:
    """Makes the engine of the version of FSDP that the settings, or the launcher, ask for."""
    assert plan.fsdp is not None
    plugin = make_plugin(plan.fsdp.settings, on_cpu=torch.device(plan.device).type == "cpu")
    return FSDP2Engine(plan, plugin) if plugin.fsdp_version == 2 else FSDP1Engine(plan, plugin)


class FSDPEngine(ShardedEngine):
    """Base of the engines of both versions, which train one model that is sharded over several processes."""

    def __init__(self, plan: EnginePlan, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(plan, make_accelerator(plan, fsdp_plugin=plugin))
        _shard_on_any_device(self.accelerator, plugin, plan.precision.mixed)
        self._plugin = plugin

    @abstractmethod
    def _shard(self, model: nn.Module) -> nn.Module:
        """Returns the sharded model of a model that is whole."""

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        check_wrapped_classes(model, self._plugin)
        if (sharded := self._find_sharded(model)) is None:
            sharded = self._sharded = self._shard(model)
        return sharded

    def _find_sharded(self, model: nn.Module) -> nn.Module | None:
        is_sharded = self._sharded is not None and self.unwrap(self._sharded) is self.unwrap(model)
        return self._sharded if is_sharded else None

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # parameters are gathered in the type that the forward pass wants

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        # A process that has finished its text keeps calling the model, because all processes join each forward pass.
        return nullcontext({"synced_gpus": True} if self._world_size > 1 else {})

    @property
    def writes_parts(self) -> bool:
        return self.holds_parts and "SHARDED" in str(self._plugin.state_dict_type)


class FSDP2Engine(FSDPEngine):
    """Engine for FSDP version 2, which shards each parameter in place."""

    _hooked: nn.Module | None = None

    @property
    def hides_output_layer(self) -> str | None:
        """None where accelerate shards it with the last norm: gathered once, from the forward to the backward pass."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

        policy = self._plugin.auto_wrap_policy
        if self._plan.compile.backend is not None:
            return super().hides_output_layer
        if getattr(policy, "func", policy) is size_based_auto_wrap_policy:
            return "min_num_params shards the output layer by itself, which is gathered for its own forward pass only"
        return None

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if self._plan.stands_in:
            sharded = self.setup_for_evaluation(model)
            return sharded, make_optimizer(sharded)
        optimizer = make_optimizer(model)
        with self._earlier.exchanged_gradients(optimizer, model):
            sharded = self.setup_for_evaluation(model)
        step_each_kind(optimizer)
        return sharded, optimizer

    def _shard(self, model: nn.Module) -> nn.Module:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

        self._earlier.note(model)
        with shared_embeddings_in_the_root(model), chosen_modules(model, self._plugin):
            if self._plugin.activation_checkpointing:
                model = fsdp2_apply_ac(self.accelerator, model)
            sharded: nn.Module = fsdp2_prepare_model(self.accelerator, model)
        self._return_fp32_outputs(sharded)
        return sharded

    def _return_fp32_outputs(self, sharded: nn.Module) -> None:
        """Has the model return outputs in fp32, as the other engines do in mixed precision."""
        if self._plan.precision.mixed != "no" and self._hooked is not sharded:
            sharded.register_forward_hook(lambda module, inputs, outputs: as_fp32(outputs))
            self._hooked = sharded

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        # `generate` calls the encoder directly, but its embeddings belong to the root module.
        pass_as_the_root(self._sharded)
        self._sharded.unshard()
        try:
            with super().generating(model) as needed:
                yield needed
        finally:
            self._sharded.reshard()


def pass_as_the_root(sharded: Any) -> None:  # Any: a module that torch gives another class
    """Passes through a sharded model without computing, so that torch takes it as the root of its modules from now on.

    Otherwise the module with the first forward pass would be taken as the root.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    sharded.pass_without_computing = lambda: None
    register_fsdp_forward_method(sharded, "pass_without_computing")
    try:
        sharded.pass_without_computing()
    finally:
        del sharded.pass_without_computing


class FSDP1Engine(FSDPEngine):
    """Engine of version 1, which shards parameters as flat tensors of a wrapper around each layer."""

    def __init__(self, plan: EnginePlan, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(plan, plugin)
        if self._scaler is not None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            # Skips an update if gradients overflowed in any process.
            self._scaler = self.accelerator.scaler = ShardedGradScaler(self.device.type)

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        sharded = self.setup_for_evaluation(model)  # the optimizer works on sharded parameters from the beginning
        return sharded, make_optimizer(model)

    def _shard(self, model: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(model)  # type: ignore[no-any-return]

    @property
    def hides_weights(self) -> str | None:
        return "version 1 of FSDP has them in flat tensors; use version 2"

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        return NO_CONTEXT if sync or self._plan.ddp.sync_each_batch else self._sharded.no_sync()

    def _clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return self._sharded.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]

    def _measure(self, model: nn.Module) -> torch.Tensor:
        return self._clip(model, math.inf)

    def unwrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        inner = uncompiled(model)
        if isinstance(inner, FullyShardedDataParallel):
            whole: nn.Module = inner.module
            return whole
        return inner


def make_plugin(settings: Mapping[str, Any] | None, *, on_cpu: bool) -> FullyShardedDataParallelPlugin:
    """Translates settings of `fsdp_config` (None: the launcher's) to accelerate's; version 1 is refused on the CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    if settings is None:
        return FullyShardedDataParallelPlugin()
    version = fsdp_config.read_version(settings)
    policy = fsdp_config.wrap_policy(settings)
    if version == 1 and on_cpu:
        raise ArgumentError(
            "fsdp_config: version 1 needs GPUs; on the CPU torch dies when it puts its states together. Leave version "
            "out: 2 works on both."
        )
    chosen: dict[str, Any] = {
        "fsdp_version": version,
        "auto_wrap_policy": policy,
        "cpu_offload": _flag(settings, "cpu_offload", False) and not on_cpu,  # there it is already
        "state_dict_type": settings.get("state_dict_type", "FULL_STATE_DICT"),
        **{name: _flag(settings, name, False) for name in ("activation_checkpointing", "cpu_ram_efficient_loading")},
    }
    if policy == "SIZE_BASED_WRAP":
        chosen["min_num_params"] = int(settings.get("min_num_params", 0))
    if policy == "TRANSFORMER_BASED_WRAP" and settings.get("transformer_layer_cls_to_wrap"):
        chosen["transformer_cls_names_to_wrap"] = list(settings["transformer_layer_cls_to_wrap"])
    if version == 2:
        reshards = _flag(settings, "reshard_after_forward", True)
        chosen["reshard_after_forward"] = fsdp_config.RESHARDS.get(fsdp_config.read_strategy(settings), reshards)
    else:
        chosen["reshard_after_forward"] = str(settings.get("reshard_after_forward", "full_shard")).upper()
        chosen |= {name: _flag(settings, name, default) for name, default in FLAGS_OF_VERSION_1.items()}
        chosen["backward_prefetch"] = str(settings.get("backward_prefetch", "NO_PREFETCH")).upper()
    return FullyShardedDataParallelPlugin(**chosen)


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    return is_true(value) if isinstance(value, str) else bool(value)


def _shard_on_any_device(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, mixed: str) -> None:
    """Has accelerate shard on the CPU too, and in a group of one process, as torch can."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
    if state.device.type == "cpu":
        state.device = torch.device("cpu")  # accelerate numbers it by process, and torch wants it without a number
    if mixed != "no" and plugin.fsdp_version == 2:
        # Outputs in fp32, such as the loss, stay so; `_return_fp32_outputs` converts the rest.
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


@contextmanager
def shared_embeddings_in_the_root(model: Model) -> Iterator[None]:
    """Keeps accelerate from sharding the embeddings apart within the context, where other modules share their weight.

    In T5, more modules share the weight than accelerate looks for, and BERT's head for masked words has the bias of its
    output embeddings too, so one parameter would be in two shards, which torch refuses.
    """
    found = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    known: set[nn.Module] = {module for module in found if module is not None}
    shared = {parameter for module in known for parameter in module.parameters(recurse=False)}
    if all(module in known for module in model.modules() if shared & {*module.parameters(recurse=False)}):
        yield
        return
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


@contextmanager
def chosen_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """Has accelerate shard, within the context, the modules of `modules_to_shard` one by one."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if policy is None:
        yield
        return
    classes = plugin.transformer_cls_names_to_wrap
    if policy is size_based_auto_wrap_policy:
        chosen = modules_to_shard(model, min_num_params=plugin.min_num_params)
    else:
        there = {type(module).__name__.removeprefix("FSDP") for module in model.modules()}
        if classes is None:  # use the classes that the model itself names
            classes = [name for name in getattr(model, "_no_split_modules", None) or () if name in there]
            plugin.transformer_cls_names_to_wrap = classes
        chosen = modules_to_shard(model, classes=classes)
    known = {*model.modules()}

    def is_unit(module: nn.Module) -> bool:
        """True for a chosen module, and for a wrapper that accelerate puts around one to checkpoint activations."""
        return module in chosen or (module not in known and any(child in chosen for child in module.children()))

    before = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = lambda *_: is_unit
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = before


def modules_to_shard(
    model: nn.Module, *, classes: Sequence[str] = (), min_num_params: int | None = None
) -> set[nn.Module]:
    """Modules below the model that become units of their own: of these classes, or from a number of parameters on.

    Excluded are modules around a module that accelerate makes a unit after them (embeddings, the last norm), since a
    part of a unit cannot become one, and modules that share a parameter with a module outside. Parameters in smaller
    units do not count for `min_num_params`.
    """
    getters = [getattr(model, f"get_{kind}_embeddings", lambda: None) for kind in ("input", "output")]
    later = {*(get() for get in getters), _final_norm(model)} - {None}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    chosen: set[nn.Module] = set()
    in_units: set[nn.Parameter] = set()
    for module in [*model.modules()][:0:-1]:  # submodules before the module that contains them
        inside = {*module.modules()}
        own = {*module.parameters()}
        is_shared = any(owners[parameter] - inside for parameter in own)
        if is_shared or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (later & inside) - {module}:
            continue
        size = sum(parameter.numel() for parameter in own - in_units)
        is_large = min_num_params is not None and size >= max(min_num_params, 1)
        if is_large or type(module).__name__.removeprefix("FSDP") in classes:
            chosen.add(module)
            in_units |= own
    return chosen


def _final_norm(model: nn.Module) -> nn.Module | None:
    """Returns the norm that accelerate shards with the output layer: the last one among the base model's children."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    if not isinstance(base, nn.Module):
        return None
    norms = [child for child in base.children() if "Norm" in type(child).__name__]
    return norms[-1] if norms else None


def check_wrapped_classes(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """Raises ModelError if the model lacks a class of layers that the plugin wraps, and names similar ones."""
    there = {type(module).__name__.removeprefix("FSDP"): None for module in model.modules()}
    for name in [name for name in plugin.transformer_cls_names_to_wrap or () if name not in there]:
        near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or list(there)[:5]
        raise ModelError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {name!r}, and {type(model).__name__} has no such layer. "
            f"Nearest: {', '.join(near)}. Name a class of the model's layers, or leave the setting out."
        )
