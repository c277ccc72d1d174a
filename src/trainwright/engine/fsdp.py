"""Parameters, gradients and optimizer states sharded over processes by torch's FSDP; version 2 unless 1 is asked for.

Accelerate reads the settings and wraps the model. Gradients are averaged over processes as everywhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright._types import Prepared
from trainwright.config.plans import EnginePlan
from trainwright.distributed.collectives import background_group
from trainwright.distributed.world import is_true
from trainwright.engine import sharded_state
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT
from trainwright.engine.compile import compiled, uncompiled
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.precision import as_fp32
from trainwright.engine.updates import Updates
from trainwright.errors import ArgumentError, ModelError

TRANSFORMER_WRAP, SIZE_WRAP = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"
FLAGS_OF_VERSION_1 = {"forward_prefetch": False, "use_orig_params": True, "sync_module_states": True}


class FSDPEngine(DistributedEngine):
    """Trains one model whose parts are held by several processes."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.fsdp is not None
        plugin = make_plugin(plan.fsdp.settings, on_cpu=torch.device(plan.device).type == "cpu")
        super().__init__(plan, make_accelerator(plan, fsdp_plugin=plugin))
        _shard_on_any_device(self.accelerator, plugin, plan.precision.mixed)
        self._plugin = plugin
        self._is_new = plugin.fsdp_version == 2
        self._wrapped: Any = None
        self._hooked: Any = None
        self._syncs = True
        self._updates = Updates(self._scaler())

    def _scaler(self) -> Any:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is None or self._is_new:
            return scaler
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        self.accelerator.scaler = ShardedGradScaler(self.device.type)  # it asks the others whether theirs overflowed
        return self.accelerator.scaler

    def place(self, model: nn.Module) -> nn.Module:
        return model  # a device may have room for a part only; it is moved when it is sharded

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Any],
        make_scheduler: Callable[[Any], Any],
    ) -> Prepared:
        check_wrapped_classes(model, self._plugin)
        if self._is_new:
            whole = make_optimizer(model)
            with shared_embeddings_in_the_root(model):
                self._wrapped, prepared = self.accelerator.prepare(model, whole)
            optimizer = prepared.optimizer
        else:  # its optimizer works on the sharded parameters from the beginning
            self._wrapped = self._wrap(model)
            optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        self._give_plain_outputs()
        self._syncs = True
        self._updates.begin(self._wrapped, optimizer)
        return Prepared(compiled(self._wrapped, self._plan.compile), optimizer, scheduler)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._wrapped is not None and self.unwrap(self._wrapped) is model:
            return self._wrapped  # type: ignore[no-any-return]
        if self._is_new:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            with shared_embeddings_in_the_root(model):
                return fsdp2_prepare_model(self.accelerator, model)  # type: ignore[no-any-return]
        return self.accelerator.prepare_model(model)  # type: ignore[no-any-return]

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        check_wrapped_classes(model, self._plugin)
        self._wrapped = self._wrap(model)
        self._give_plain_outputs()
        return self._wrapped  # type: ignore[no-any-return]

    def _give_plain_outputs(self) -> None:
        """Outputs in fp32, as the other engines give them in mixed precision."""
        if self._is_new and self._plan.precision.mixed != "no" and self._hooked is not self._wrapped:
            self._wrapped.register_forward_hook(lambda module, inputs, outputs: as_fp32(outputs))
            self._hooked = self._wrapped

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # parameters are gathered in the type that the forward pass wants

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if self._plan.ddp.sync_each_batch:
            return NO_CONTEXT
        if not self._is_new:
            return NO_CONTEXT if sync else self._wrapped.no_sync()
        if sync != self._syncs:
            self._wrapped.set_requires_gradient_sync(sync)
            self._syncs = sync
        return NO_CONTEXT

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        if self._is_new:
            return self._updates.clip(max_norm)
        self._updates.unscale()
        return self._wrapped.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]

    def refresh(self, model: nn.Module) -> None:
        self._let_go()
        self._updates.refresh(self._wrapped)

    def _let_go(self) -> None:
        """An evaluation leaves parameters whole, waiting for a backward pass that never comes."""
        from torch.distributed.fsdp import FSDPModule

        for module in self._wrapped.modules() if self._is_new else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner if self._is_new else getattr(inner, "_fsdp_wrapped_module", inner)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        wrapped = self._wrapped if self._is_new else None
        if wrapped is not None:  # an encoder is called by itself, and its embeddings lie in the root
            wrapped._get_fsdp_state()._lazy_init()  # what the first forward pass of the whole model does
            wrapped.unshard()
        try:
            # One whose text has ended goes on with the others: each forward pass is one of all processes.
            yield {"synced_gpus": True} if self._world_size > 1 else {}
        finally:
            if wrapped is not None:
                wrapped.reshard()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return self._wrapped is not None

    @property
    def writes_parts(self) -> bool:
        return self.holds_parts and "SHARDED" in str(self._plugin.state_dict_type)

    def save_parts(self, folder: Path, optimizer: Any, *, put: Callable[..., None]) -> None:
        self._let_go()
        sharded_state.save(folder, self._wrapped, optimizer, put=put, group=background_group())

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        if self._wrapped is None:
            return None
        self._let_go()
        return sharded_state.whole_weights(self._wrapped)

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        is_wrapped = self._wrapped is not None and self.unwrap(self._wrapped) is self.unwrap(model)
        if is_wrapped:
            self._let_go()
        return sharded_state.load_whole_weights(self._wrapped if is_wrapped else model, weights)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return sharded_state.whole_optimizer_state(self._wrapped, optimizer)

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        sharded_state.load_whole_optimizer_state(self._wrapped, optimizer, state)


def make_plugin(settings: Mapping[str, Any] | None, *, on_cpu: bool) -> Any:
    """Accelerate's own settings; None: those of the launcher.

    Raises:
        ArgumentError: version 1 on the CPU.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    if settings is None:
        return FullyShardedDataParallelPlugin()
    if int(settings.get("version", 2)) == 1 and on_cpu:
        raise ArgumentError(
            "fsdp_config: version 1 needs GPUs; on the CPU torch dies when it puts its states together. Leave version "
            "out: 2 works on both."
        )
    version, policy = int(settings.get("version", 2)), settings.get("auto_wrap_policy", TRANSFORMER_WRAP)
    chosen: dict[str, Any] = {
        "fsdp_version": version,
        "auto_wrap_policy": policy,
        "cpu_offload": _flag(settings, "cpu_offload", False) and not on_cpu,  # there it is already
        "state_dict_type": settings.get("state_dict_type", "FULL_STATE_DICT"),
        "activation_checkpointing": _flag(settings, "activation_checkpointing", False),
        "cpu_ram_efficient_loading": _flag(settings, "cpu_ram_efficient_loading", False),
    }
    if policy == SIZE_WRAP:
        chosen["min_num_params"] = int(settings.get("min_num_params", 0))
    if policy == TRANSFORMER_WRAP and settings.get("transformer_layer_cls_to_wrap"):
        chosen["transformer_cls_names_to_wrap"] = list(settings["transformer_layer_cls_to_wrap"])
    chosen["reshard_after_forward"] = _resharding(settings, version)
    if version == 1:
        chosen |= {name: _flag(settings, name, default) for name, default in FLAGS_OF_VERSION_1.items()}
        chosen["limit_all_gathers"] = _flag(settings, "limit_all_gathers", True)
        chosen["backward_prefetch"] = str(settings.get("backward_prefetch", "NO_PREFETCH")).upper()
    return FullyShardedDataParallelPlugin(**chosen)


def _resharding(settings: Mapping[str, Any], version: int) -> Any:
    if version == 2:
        return _flag(settings, "reshard_after_forward", True)
    return str(settings.get("reshard_after_forward", "full_shard")).upper()


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    return is_true(value) if isinstance(value, str) else bool(value)


def _shard_on_any_device(accelerator: Any, plugin: Any, mixed: str) -> None:
    """Accelerate leaves sharding out on the CPU, and in a group of one process; torch does not."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = plugin
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
    if state.device.type == "cpu":
        state.device = torch.device("cpu")  # accelerate numbers it by process, and torch wants it without a number
    if mixed != "no" and plugin.fsdp_version == 2:
        from dataclasses import replace

        # What a model computes in fp32, such as its loss, stays so; `_give_plain_outputs` brings the rest to fp32.
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


@contextmanager
def shared_embeddings_in_the_root(model: Any) -> Iterator[None]:
    """Accelerate holds a model's embeddings in a part of their own. Where more modules share their weight than those
    it looks for, as in T5, that leaves one weight in two parts, which torch refuses: they stay with the whole model.
    """
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    weight = getattr(find(), "weight", None)
    known = (find(), getattr(model, "get_output_embeddings", lambda: None)())
    owners = [one for one in model.modules() if weight is not None and getattr(one, "weight", None) is weight]
    if all(any(owner is one for one in known) for owner in owners):
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


def check_wrapped_classes(model: nn.Module, plugin: Any) -> None:
    """Whether the layers to wrap are there.

    Raises:
        ModelError: names the class that is not, and those that are most like it.
    """
    names = plugin.transformer_cls_names_to_wrap or ()
    there = {type(module).__name__.removeprefix("FSDP"): None for module in model.modules()}
    for name in [name for name in names if name not in there]:
        near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or list(there)[:5]
        raise ModelError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {name!r}, and {type(model).__name__} has no such layer. "
            f"Nearest: {', '.join(near)}. Name a class of the model's layers, or leave the setting out."
        )
