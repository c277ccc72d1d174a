"""DeepSpeed ZeRO: DeepSpeed's engine averages, clips and updates. Checkpoints are whole, by `deepspeed_state.py`.

DeepSpeed clips within its update, so `clip` updates the weights, and `step` returns whether the update was applied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._types import Optimizer, Prepared, StateDict
from trainwright.config import deepspeed_config as settings
from trainwright.config import zero3_init
from trainwright.config.plans import EnginePlan
from trainwright.distributed.process_group import start_group
from trainwright.distributed.world import World
from trainwright.engine import deepspeed_state
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer, MakeScheduler
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.precision import DTYPES
from trainwright.errors import ArgumentError

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin

GATHERS_HALVES = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
LAUNCHER_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
OF_TRAINING = ("optimizer", "scheduler")  # parts of a configuration


class DeepSpeedEngine(DistributedEngine):
    """Trains with DeepSpeed's engine around the model; a MissingPackageError where DeepSpeed is not installed."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.deepspeed is not None
        self._config = dict(plan.deepspeed.config)
        plugin = _plugin(self._config, on_cpu=torch.device(plan.device).type == "cpu")
        start_group(World.detect(use_cpu=plan.use_cpu), backend=plan.ddp.backend,
                    timeout=timedelta(seconds=plan.ddp.timeout_s))  # fmt: skip
        with zero3_init.keeping_the_mark():
            accelerator = make_accelerator(plan, cpu=False, deepspeed_plugin=plugin)
        super().__init__(plan, accelerator)
        self._train_engine: Any = None  # deepspeed.DeepSpeedEngine, which is not imported here
        self._eval_engine: Any = None  # one without an optimizer: a partitioned model is evaluated before training
        self._groups: list[list[nn.Parameter]] = []  # parameter groups as the optimizer got them
        self._fp32_master_weights: Mapping[str, torch.Tensor] | None = None  # loaded before the engine was made
        self._was_applied: bool | None = None  # the update of this window; None: it is not made yet
        self._num_steps = self._num_warmup_steps = 0

    def expect(self, *, num_steps: int, num_warmup_steps: int) -> None:
        self._num_steps, self._num_warmup_steps = num_steps, num_warmup_steps

    def place(self, model: nn.Module) -> nn.Module:
        return model  # DeepSpeed moves the model, or a part of it

    def setup(self, model: nn.Module, *, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> Prepared:
        import deepspeed
        from accelerate.utils import DeepSpeedSchedulerWrapper

        model = self.unwrap(model)
        config = self._filled_in(model)
        given: dict[str, Any] = {}
        if "optimizer" in config:
            given["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
            self._groups = [given["model_parameters"]]
        else:
            optimizer = make_optimizer(model)
            if self._trains(model) and optimizer is self._train_engine.optimizer:  # a second train()
                return Prepared(self._train_engine, optimizer, make_scheduler(deepspeed_state.inner(optimizer)))
            given["optimizer"] = optimizer = self._for_offload(optimizer, config)
            self._groups = [list(group["params"]) for group in optimizer.param_groups]
            config["zero_allow_untested_optimizer"] = True
        halves = [name for name in DTYPES if settings.get(config, f"{name}.enabled") is True]
        self.input_dtype = DTYPES[halves[0]] if halves else None
        self._leave(model)
        self._train_engine, optimizer, _, schedule = deepspeed.initialize(model=model, config=config, **given)
        self._train_engine._trainwright_module = model
        if self._fp32_master_weights is not None:
            deepspeed_state.set_masters(model, self._fp32_master_weights)
            self._fp32_master_weights = None
        if "scheduler" in config:  # DeepSpeed's engine steps it
            scheduler = DeepSpeedSchedulerWrapper(schedule, optimizer)
        else:
            scheduler = make_scheduler(deepspeed_state.inner(optimizer))
        self._was_applied = None
        return Prepared(self._train_engine, optimizer, scheduler)

    def _for_offload(self, optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
        """Returns DeepSpeed's CPU optimizer of the same kind where states are offloaded, as accelerate does.

        Unless the configuration says `"zero_force_ds_cpu_optimizer": false`, which is written into it where DeepSpeed
        has none of the kind. DeepSpeed builds its optimizer at the first use.
        """
        forces, device = (
            settings.get(config, place)
            for place in ("zero_force_ds_cpu_optimizer", "zero_optimization.offload_optimizer.device")
        )
        if device in (None, "none") or forces is False or type(optimizer).__module__.startswith("deepspeed."):
            return optimizer
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.Adagrad)):  # AdamW is an Adam
            config["zero_force_ds_cpu_optimizer"] = False
            return optimizer
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        made: Optimizer = map_pytorch_optim_to_deepspeed(optimizer)
        return made

    def _filled_in(self, model: nn.Module) -> dict[str, Any]:
        """Returns the configuration with the values that only the model and the length of the run decide."""
        made = settings.read(self._config)
        config = getattr(model, "config", None)
        sizes = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None)]
        known: dict[str, Any] = {
            "scheduler.params.total_num_steps": self._num_steps,
            "scheduler.params.warmup_num_steps": max(self._num_warmup_steps, 1),
        }
        if sizes[0] is not None:
            size = max(sizes)
            known["zero_optimization.reduce_bucket_size"] = size * size
            known["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * size * size)
            known["zero_optimization.stage3_param_persistence_threshold"] = 10 * size
        for place in list(settings.autos(made)):
            if place not in known:
                raise ArgumentError(
                    f'The DeepSpeed configuration has "auto" at {place}, which follows from config.hidden_size, and '
                    f"{type(model).__name__} has none. Write a number there."
                )
            settings.put(made, place, known[place])
        return made

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        module = self.unwrap(model)
        if self._trains(module):
            return self._train_engine  # type: ignore[no-any-return]
        if not deepspeed_state.is_partitioned(module):
            return model.to(self.device)
        if self._eval_engine is None or self._eval_engine.module is not module:
            import deepspeed

            config = {key: value for key, value in self._filled_in(module).items() if key not in OF_TRAINING}
            self._eval_engine = deepspeed.initialize(model=module, config=config)[0]
            self._eval_engine._trainwright_module = module
        return self._eval_engine  # type: ignore[no-any-return]

    def _trains(self, module: nn.Module) -> bool:
        return self._train_engine is not None and self._train_engine.module is module

    def _leave(self, module: nn.Module) -> None:
        """Destroys earlier engines of a model; its weights in fp32 are kept for the next one."""
        if self._trains(module) and self._is_mixed:
            self._fp32_master_weights = deepspeed_state.whole_weights(module, keeps=True)
        for engine in (self._train_engine, self._eval_engine):
            if engine is not None and engine.module is module:
                engine.destroy()
        self._train_engine = self._eval_engine = None

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # the weights have the type already

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        self._train_engine.set_gradient_accumulation_boundary(sync)
        return NO_CONTEXT

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._was_applied = None
        gradient = kwargs.pop("gradient", None)
        loss = loss if gradient is None else loss * gradient  # DeepSpeed begins the backward pass itself
        self._train_engine.backward(loss, scale_wrt_gas=False, **kwargs)  # the loss is normalized already

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        self._update()
        norm = self._train_engine.get_global_grad_norm()
        return torch.as_tensor(math.nan if norm is None else norm)

    @property
    def updates_in_clip(self) -> bool:
        return True

    @property
    def knows_norm(self) -> bool:
        return self._stage > 0

    @property
    def scales_loss(self) -> bool:
        return settings.get(self._config, "fp16.enabled") is True

    def _update(self) -> None:
        if self._was_applied is None:
            self._train_engine.step()
            self._was_applied = bool(self._train_engine.was_step_applied())

    def step(self, optimizer: Optimizer) -> bool:
        self._update()
        return bool(self._was_applied)

    def zero_grad(self) -> None:
        """DeepSpeed clears gradients when it has used them."""

    def refresh(self, model: nn.Module) -> None:
        """DeepSpeed keeps its own list of parameters."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = getattr(model, "_trainwright_module", model)
        return inner

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({"synced_gpus": True} if self._stage == 3 and self._world_size > 1 else {})

    @property
    def _stage(self) -> int:
        return int(settings.get(self._config, "zero_optimization.stage") or 0)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return self._train_engine is not None and self._stage > 0

    @property
    def _is_mixed(self) -> bool:
        return any(settings.get(self._config, f"{name}.enabled") is True for name in ("fp16", "bf16"))

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        module = self.unwrap(model)
        if deepspeed_state.is_partitioned(module) or (self._trains(module) and self._is_mixed):
            return deepspeed_state.whole_weights(module, keeps=self.accelerator.is_main_process)
        return None

    def finished_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        whole = self.whole_weights(model)
        if whole is None or (self._stage == 3 and not settings.get(self._config, GATHERS_HALVES)):
            return whole
        types = {name: value.dtype for name, value in self.unwrap(model).state_dict().items()}
        return {name: value.to(types[name]) for name, value in whole.items()}

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:  # torch's named tuple
        module = self.unwrap(model)
        if self._trains(module) and self.holds_parts:
            return deepspeed_state.set_masters(module, weights)
        self._fp32_master_weights = weights if self._is_mixed else None
        if deepspeed_state.is_partitioned(module):
            return deepspeed_state.set_weights(module, weights)
        return module.load_state_dict(weights, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        if not self.holds_parts:
            return super().optimizer_state(optimizer)
        return deepspeed_state.whole_optimizer_state(optimizer, self._groups, keeps=self.accelerator.is_main_process)

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict) -> None:
        if not self.holds_parts:
            super().load_optimizer_state(optimizer, state)
        else:
            deepspeed_state.load_whole_optimizer_state(optimizer, self._groups, state)

    def published_flags(self) -> dict[str, Any]:
        return {**super().published_flags(), "deepspeed": self._train_engine}


def _plugin(config: dict[str, Any], *, on_cpu: bool) -> DeepSpeedPlugin:
    """Returns accelerate's plugin with the configuration; a MissingPackageError where DeepSpeed is not installed."""
    zero3_init.load(on_cpu=on_cpu)
    from accelerate.utils import DeepSpeedPlugin

    # accelerate refuses a whole configuration beside fields of its launcher, which are in the configuration already.
    fields = os.environ.pop(LAUNCHER_FIELDS, None)
    try:
        return DeepSpeedPlugin(hf_ds_config=settings.read(config))
    finally:
        if fields is not None:
            os.environ[LAUNCHER_FIELDS] = fields
