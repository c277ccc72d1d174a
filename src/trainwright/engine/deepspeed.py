"""DeepSpeed ZeRO: DeepSpeed's engine averages, clips and updates; checkpoints are whole.

DeepSpeed clips within its update, so `clip` updates the weights, and `step` returns whether the update was applied. The
state is gathered from the processes as one process would have it, and partitioned again. So a checkpoint is the same
whatever engine wrote it, and is resumed with any engine and number of processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from trainwright._types import Optimizer, Prepared, StateDict, UnmatchedNames
from trainwright.config import deepspeed_config as settings
from trainwright.config import zero3_init
from trainwright.config.plans import EnginePlan
from trainwright.distributed.process_group import start_group
from trainwright.distributed.world import World
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer, MakeScheduler, is_from
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.precision import DTYPES
from trainwright.errors import ModelError

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin

GATHERS_HALVES = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
LAUNCHER_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
OF_TRAINING = ("optimizer", "scheduler")  # parts of a configuration
Config: TypeAlias = dict[str, Any]  # DeepSpeed's configuration as parsed JSON
Groups = list[list[nn.Parameter]]
OF_OPTIMIZERS = ("_z3_optimizer", "_hp_mapping")  # attributes of a parameter that an optimizer has in fp32


class DeepSpeedEngine(DistributedEngine):
    """Trains with DeepSpeed's engine around the model; a MissingPackageError where DeepSpeed is not installed."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.deepspeed is not None
        self._config = dict(plan.deepspeed.config)
        plugin = _plugin(self._config, on_cpu=torch.device(plan.device).type == "cpu")
        start_group(
            World.detect(use_cpu=plan.use_cpu), backend=plan.ddp.backend, timeout=timedelta(seconds=plan.ddp.timeout_s)
        )
        with zero3_init.keeping_the_mark():
            accelerator = make_accelerator(plan, cpu=False, deepspeed_plugin=plugin)
        super().__init__(plan, accelerator)
        self._train_engine: Any = None  # deepspeed.DeepSpeedEngine, which is not imported here
        self._eval_engine: Any = None  # without optimizer, to evaluate a partitioned model before training
        self._groups: list[list[nn.Parameter]] = []  # parameter groups as the optimizer got them
        self._fp32_master_weights: Mapping[str, torch.Tensor] | None = None  # loaded before the engine was made
        self._was_applied: bool | None = None  # the update of this window; None: it is not made yet
        self._num_steps = self._num_warmup_steps = 0

    def expect(self, *, num_steps: int, num_warmup_steps: int) -> None:
        self._num_steps = num_steps
        self._num_warmup_steps = num_warmup_steps

    def place(self, model: nn.Module) -> nn.Module:
        return model  # DeepSpeed moves the model, or a part of it

    def setup(self, model: nn.Module, *, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> Prepared:
        import deepspeed
        from accelerate.utils import DeepSpeedSchedulerWrapper

        model = self.unwrap(model)
        config = self._filled_in(model)
        given: StateDict = {}
        if "optimizer" in config:
            given["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
            self._groups = [given["model_parameters"]]
        else:
            optimizer = make_optimizer(model)
            if self._trains(model) and optimizer is self._train_engine.optimizer:  # a second train()
                return Prepared(self._train_engine, optimizer, make_scheduler(inner(optimizer)))
            given["optimizer"] = optimizer = self._for_offload(optimizer, config)
            self._groups = [list(group["params"]) for group in optimizer.param_groups]
            config["zero_allow_untested_optimizer"] = True
        self.input_dtype = next((DTYPES[name] for name in DTYPES if _is_on(config, name)), None)
        self._leave(model)
        self._train_engine, optimizer, _, schedule = deepspeed.initialize(model=model, config=config, **given)
        self._train_engine._trainwright_module = model
        compiles = self._plan.compile
        if compiles.backend is not None:  # in its place: DeepSpeed's engine goes on calling the same module
            kwargs = {} if compiles.mode is None else {"mode": compiles.mode}
            self._train_engine.compile(backend=compiles.backend, compile_kwargs=kwargs)
        if self._fp32_master_weights is not None:
            set_masters(model, self._fp32_master_weights)
            self._fp32_master_weights = None
        if "scheduler" in config:  # DeepSpeed's engine steps it
            scheduler = DeepSpeedSchedulerWrapper(schedule, optimizer)
        else:
            scheduler = make_scheduler(inner(optimizer))
        self._was_applied = None
        return Prepared(self._train_engine, optimizer, scheduler)

    def updated_tensors(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """Yields the parameters that DeepSpeed was given; its optimizer has flat copies of them."""
        if self._train_engine is None or optimizer is not self._train_engine.optimizer:
            yield from super().updated_tensors(optimizer)
        else:
            yield from chain.from_iterable(self._groups)

    def _for_offload(self, optimizer: Optimizer, config: Config) -> Optimizer:
        """Returns DeepSpeed's CPU optimizer of the same kind where states are offloaded, as accelerate does.

        Unless the configuration says `"zero_force_ds_cpu_optimizer": false`, which is written into it where DeepSpeed
        has none of the kind. DeepSpeed builds its optimizer at the first use.
        """
        device = settings.get(config, "zero_optimization.offload_optimizer.device")
        forces = settings.get(config, "zero_force_ds_cpu_optimizer") is not False
        if device in (None, "none") or not forces or type(optimizer).__module__.startswith("deepspeed."):
            return optimizer
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.Adagrad)):  # AdamW is an Adam
            config["zero_force_ds_cpu_optimizer"] = False
            return optimizer
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        made: Optimizer = map_pytorch_optim_to_deepspeed(optimizer)
        return made

    def _filled_in(self, model: nn.Module) -> Config:
        """Returns the configuration with the values that only the model and the length of the run decide."""
        return settings.filled_in(
            self._config, model, num_steps=self._num_steps, num_warmup_steps=self._num_warmup_steps
        )

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        module = self.unwrap(model)
        if self._trains(module):
            return self._train_engine  # type: ignore[no-any-return]
        if not is_partitioned(module):
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
            self._fp32_master_weights = whole_weights(module, keeps=True)
        for engine in (self._train_engine, self._eval_engine):
            if engine is not None and engine.module is module:
                engine.destroy()
        self._train_engine = self._eval_engine = None

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # the weights have the type already

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        self._train_engine.set_gradient_accumulation_boundary(sync)
        return NO_CONTEXT

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None) -> None:
        self._was_applied = None
        # DeepSpeed begins the backward pass itself. The product is a new tensor: if the model returned the loss and
        # there is no ZeRO, hooks on the model's outputs would divide its gradient by the accumulation.
        loss = loss * (1.0 if gradient is None else gradient)
        if is_from(self.accelerator.backward, "accelerate"):
            self._train_engine.backward(loss, scale_wrt_gas=False)  # the loss is normalized already
        else:
            self.accelerator.backward(loss, scale_wrt_gas=False)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        self._update()
        norm = self._train_engine.get_global_grad_norm()
        return torch.as_tensor(math.nan if norm is None else norm)

    def measure_norm(self, model: nn.Module) -> torch.Tensor:
        return self.clip(model, math.inf)  # DeepSpeed clips by its own configuration

    @property
    def updates_in_clip(self) -> bool:
        return True

    @property
    def knows_norm(self) -> bool:
        return self._stage > 0

    @property
    def scales_loss(self) -> bool:
        return _is_on(self._config, "fp16")

    def _update(self) -> None:
        if self._was_applied is None:
            self._train_engine.step()
            self._was_applied = bool(self._train_engine.was_step_applied())
            if self._stage > 0:
                self._train_engine.optimizer.custom_loss_scaler = False

    def step(self, optimizer: Optimizer) -> bool:
        self._update()
        return bool(self._was_applied)

    def scale_gradients(self, model: nn.Module, factor: torch.Tensor) -> None:
        """Scales them within the update: ZeRO divides gradients by its loss scale there, which takes the factor in.

        Reads the factor back; the update of DeepSpeed reads the norm.
        """
        optimizer = self._train_engine.optimizer
        if self._stage > 0:
            optimizer.external_loss_scale = optimizer.loss_scale / float(factor)
            optimizer.custom_loss_scaler = True
        elif self._is_mixed:
            raise ModelError(
                "A LossOutput with num_items in several micro-batches or processes needs the gradients before the "
                "update, which DeepSpeed keeps to itself in bf16 and fp16 without ZeRO. Set zero_optimization.stage to "
                "1 or above, or divide the loss by num_items_in_batch."
            )
        else:
            super().scale_gradients(model, factor)

    def zero_grad(self, model: nn.Module) -> None:
        """DeepSpeed clears gradients when it has used them."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = getattr(model, "_trainwright_module", model)
        return inner

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({"synced_gpus": True} if self._stage == 3 and self._world_size > 1 else {})

    def modules_that_wait(self, model: nn.Module) -> list[nn.Module] | None:
        if self._stage < 3:
            return []
        if self._plan.compile.backend is not None:
            return None  # a compiled module runs no hooks of others
        return [module for module in self.unwrap(model).modules() if [*module.parameters(recurse=False)]]

    @property
    def _stage(self) -> int:
        return int(settings.get(self._config, "zero_optimization.stage") or 0)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return self._train_engine is not None and self._stage > 0

    @property
    def hides_weights(self) -> str | None:
        if self._stage == 3:
            return "ZeRO stage 3 has them in partitions; train in fp32 with stage 2"
        return "DeepSpeed keeps them in its optimizer in bf16 and fp16; train in fp32" if self._is_mixed else None

    def keeps_evaluation(self, model: nn.Module) -> str | None:
        if self._stage != 3 or self._is_mixed:
            return self.hides_weights
        if is_partitioned(self.unwrap(model)):
            return (
                "its parameters are partitioned already, so it cannot be copied into another process; make the model "
                "before TrainingArguments, with a new trainer for each train()"
            )
        return None

    @property
    def _is_mixed(self) -> bool:
        return any(_is_on(self._config, name) for name in DTYPES)

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        module = self.unwrap(model)
        if is_partitioned(module) or (self._trains(module) and self._is_mixed):
            return whole_weights(module, keeps=self.accelerator.is_main_process)
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
            return set_masters(module, weights)
        self._fp32_master_weights = weights if self._is_mixed else None
        if is_partitioned(module):
            return set_weights(module, weights)
        return module.load_state_dict(weights, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        if not self.holds_parts:
            return super().optimizer_state(optimizer)
        return whole_optimizer_state(optimizer, self._groups, keeps=self.accelerator.is_main_process)

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict) -> None:
        if not self.holds_parts:
            super().load_optimizer_state(optimizer, state)
        else:
            load_whole_optimizer_state(optimizer, self._groups, state)

    def published_flags(self) -> dict[str, Any]:
        return {**super().published_flags(), "deepspeed": self._train_engine}


def _is_on(config: Config, name: str) -> bool:
    return settings.get(config, f"{name}.enabled") is True


def _plugin(config: Config, *, on_cpu: bool) -> DeepSpeedPlugin:
    """Returns accelerate's plugin with the configuration; a MissingPackageError where DeepSpeed is not installed."""
    zero3_init.load(on_cpu=on_cpu)
    from accelerate.utils import DeepSpeedPlugin

    # accelerate refuses a whole configuration if its launcher's variables are set too; ours already includes them.
    fields = os.environ.pop(LAUNCHER_FIELDS, None)
    try:
        return DeepSpeedPlugin(hf_ds_config=settings.read(config))
    finally:
        if fields is not None:
            os.environ[LAUNCHER_FIELDS] = fields


# -- whole states ---------------------------------------------------------------------------------------------------


def inner(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds the learning rates: the one wrapped by ZeRO, or without ZeRO this one."""
    return getattr(optimizer, "optimizer", optimizer)


def is_partitioned(module: nn.Module) -> bool:
    """Returns True if parameters are partitioned over processes (ZeRO-3)."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def whole_weights(module: nn.Module, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Gathers weights, in fp32 if they are trained, to the CPU; none unless `keeps`. All processes call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        is_trained = parameter.requires_grad and any(hasattr(parameter, link) for link in OF_OPTIMIZERS)
        value = safe_get_full_fp32_param(parameter) if is_trained else None
        if value is None:
            held = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(held):
                value = parameter.detach().clone()
        if keeps:
            whole[name] = value.detach().cpu().clone()
    if keeps:
        lasting = module.state_dict().keys() - whole
        whole |= {name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name in lasting}
    return whole


def set_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> UnmatchedNames:
    """Loads whole weights, in all processes, into parameters, partitioned or not; returns the unmatched names."""
    import deepspeed

    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in ((name, tensor) for name, tensor in tensors.items() if name in weights):
        value = weights[name].to(tensor.device)
        shape = getattr(tensor, "ds_shape", tensor.shape)
        if value.shape != shape:
            raise RuntimeError(f"{name} is of shape {list(value.shape)} there and {list(shape)} in the model")
        with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else [], modifier_rank=0):
            tensor.data.copy_(value)
    own = module.state_dict()
    lacking = [name for name in tensors if name not in weights and name in own]
    return UnmatchedNames(lacking, [name for name in weights if name not in own])


def set_masters(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> UnmatchedNames:
    """Loads whole weights as `set_weights` does, and into the optimizer's fp32 copies of them."""
    result = set_weights(module, weights)
    for name, parameter in module.named_parameters():
        if name in weights and parameter.requires_grad:
            _spread(parameter, weights[name].to(parameter.device).float(), None)
    return result


def whole_optimizer_state(optimizer: Optimizer, groups: Groups, *, keeps: bool) -> StateDict:
    """Gathers the optimizer's state as one process alone would have it, by number of a parameter; none unless `keeps`.

    The inner optimizer got its parameters in these groups. All processes call it.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    _link(optimizer)
    flats = _flat_parts(optimizer)
    states: Any = inner(optimizer).state
    spread, single = _names(states.get(flats[0], {}), flats[0].shape)
    state: dict[int, StateDict] = {}
    for number, parameter in enumerate(chain.from_iterable(groups)):
        state[number] = {
            name: _copy(value) for name, value in single.items()
        }  # one object would be counted up for each
        for name in spread:
            value = safe_get_full_optimizer_state(parameter, name)
            if keeps:
                state[number][name] = value.detach().cpu().clone()
    if not keeps:
        return {}
    numbers = count()
    numbered = [
        {**settings, "params": [next(numbers) for _ in group]}
        for settings, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state if spread or single else {}, "param_groups": numbered}


def load_whole_optimizer_state(optimizer: Optimizer, groups: Groups, state: Mapping[str, Any]) -> None:
    """Loads a state of `whole_optimizer_state`, of which each keeps its part; ValueError where groups differ."""
    if [len(g["params"]) for g in state["param_groups"]] != [len(group) for group in groups]:
        raise ValueError("its parameters are grouped otherwise")
    for mine, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine.update({key: value for key, value in saved.items() if key != "params"})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [*chain.from_iterable(groups)]
    if not state["state"]:
        return
    shape = getattr(parameters[0], "ds_shape", parameters[0].shape)
    for flat in _flat_parts(optimizer):
        spread, single = _names(state["state"][numbers[0]], shape)
        inner(optimizer).state[flat] = {**single, **{name: torch.zeros_like(flat) for name in spread}}
    _link(optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        for name in spread:
            _spread(parameter, state["state"][number][name].to(parameter.device), name)


def _spread(parameter: Any, whole: torch.Tensor, name: str | None) -> None:
    """Sets a state of a parameter (without a name, its weights in fp32), of which each process keeps its partition."""
    import torch.distributed as dist
    from deepspeed import utils

    if not hasattr(parameter, "ds_tensor"):
        set_state = utils.safe_set_full_optimizer_state
        set_weights = utils.safe_set_full_fp32_param
    else:  # stage 3 has equal partitions; DeepSpeed's own function fails if the last is shorter
        size = parameter.ds_tensor.numel()
        padding = size * dist.get_world_size() - whole.numel()
        whole = nn.functional.pad(whole.flatten(), (0, padding)).narrow(0, size * dist.get_rank(), size)
        set_state = utils.safe_set_local_optimizer_state
        set_weights = utils.safe_set_local_fp32_param
    set_weights(parameter, whole) if name is None else set_state(parameter, whole, name)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _names(state: Mapping[str, Any], shape: Sequence[int]) -> tuple[list[str], StateDict]:
    """Returns the names of states that each parameter has, of its shape, and copies of the states that all share."""
    spread = [n for n, value in state.items() if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)]
    return spread, {name: _copy(value) for name, value in state.items() if name not in spread}


def _flat_parts(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns this process's partition of the parameters, flat, as the inner optimizer has it."""
    of_stage_3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return list(of_stage_3 if of_stage_3 is not None else optimizer.single_partition_of_fp32_groups)


def _link(optimizer: Optimizer) -> None:
    """Links parameters to their states again: stages 1 and 2 do it once, when there may be none yet."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
