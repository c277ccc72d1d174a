"""What all parts of the façade share: the attributes of a trainer, and the run that owns what changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright import assemble
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config.plans import StepPlan
from trainwright.engine.base import Engine
from trainwright.engine.precision import DTYPES
from trainwright.hub.uploader import Uploader
from trainwright.journal.data_wait import DataWait
from trainwright.journal.listener import JournalListener
from trainwright.loop.context import LoopContext
from trainwright.loss_normalization import LossRule
from trainwright.optim.train_eval_mode import EvalModeGuard
from trainwright.search.base import SearchState
from trainwright.state.control import TrainerControl
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState


class Parts:
    """The attributes, typed. `trainer.Trainer` sets them; a subclass or a library may set them anew."""

    # Any: models, datasets, processing classes and arguments are the user's own types.
    args: Any
    model: Any
    model_wrapped: Any
    model_init: Callable[..., Any] | None
    data_collator: Any
    _default_collator: Any  # what data_collator is where the user brought none
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    callback_handler: CallbackHandler
    accelerator: Any
    gather_function: Any
    label_names: list[str]
    label_smoother: Any
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None
    current_gradient_accumulation_steps: int
    is_in_train: bool
    is_model_parallel: bool
    place_model_on_device: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    deepspeed: Any
    hub_model_id: str | None
    hp_search_backend: Any
    hp_name: Any
    hp_space: Any
    compute_objective: Any
    objective: Any
    _trial: Any
    _search: SearchState | None
    push_in_progress: Any
    save_model: Callable[..., None]

    _engine: Engine
    _run: RunState
    _run_id: str
    _before: assemble.Before | None
    _changes: list[str]
    _owed: tuple[bool, bool]
    _session: LoopContext
    _data_wait: DataWait
    _writer: CheckpointWriter
    _uploader: Uploader | None
    _plan: StepPlan | None
    _journal: JournalListener
    _loader: Any
    _rule: LossRule | None
    _pause: EvalModeGuard | None
    _is_rehearsing: bool
    _signature_columns: list[str] | None
    _train_batch_size: int
    _eval_dataloaders: dict[str, Any]
    _created_lr_scheduler: bool
    _memory_tracker: TrainerMemoryTracker
    _flos_model: Any
    _flos_per_token: int
    _main_input: str
    _past: Any
    _past_index: int

    if TYPE_CHECKING:  # what one family of hooks asks of another above it

        def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any: ...
        def call_model_init(self, trial: Any = None) -> Any: ...
        def create_accelerator_and_postprocess(self) -> None: ...
        def _renew_model(self, trial: Any) -> None: ...
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...
        def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None: ...

    @property
    def state(self) -> TrainerState:
        return self._run.state

    @state.setter
    def state(self, value: TrainerState) -> None:
        self._run.state = value

    @property
    def control(self) -> TrainerControl:
        return self._run.control

    @control.setter
    def control(self, value: TrainerControl) -> None:
        self._run.control = value

    @property
    def current_flos(self) -> float:
        return self._run.flos

    @current_flos.setter
    def current_flos(self, value: float) -> None:
        self._run.flos = value

    @property
    def _tr_loss(self) -> torch.Tensor:
        return self._run.meter.total

    @property
    def _total_loss_scalar(self) -> float:
        return self._run.total_loss

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, value: float) -> None:
        self._run.total_loss = value

    @property
    def _globalstep_last_logged(self) -> int:
        return self._run.step_last_logged

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, value: int) -> None:
        self._run.step_last_logged = value

    @property
    def tokenizer(self) -> Any:
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def _loss_rule(self) -> LossRule:
        return assemble.loss_rule(
            self.model,
            self.args,
            accepts_loss_kwargs=self.model_accepts_loss_kwargs,
            has_loss_func=self.compute_loss_func is not None,
            is_scaled=self.loss_is_scaled_for_ga,
            num_processes=self._engine.num_replicas,
        )

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of this machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of all."""
        return bool(self.args.process_index == 0)

    def _stateful(self) -> list[Any]:
        parts = [*self.callback_handler.callbacks, self.control]
        return [part for part in parts if callable(getattr(part, "state", None))]

    def _full_eval_type(self) -> torch.dtype | None:
        return DTYPES["fp16"] if self.args.fp16_full_eval else DTYPES["bf16"] if self.args.bf16_full_eval else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as it is run; on one device it is the model itself."""
        return model if training else self._engine.setup_for_evaluation(model)
