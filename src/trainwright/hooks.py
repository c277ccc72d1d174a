"""Protocols of the objects that a loop calls. The trainer is the hooks: the loops call its most derived methods.

These are the published names that subclasses override, so they keep the spelling of the outside world.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trainwright._types import Batch


class TrainHooks(Protocol):
    """Methods of the trainer that the training loop calls."""

    current_gradient_accumulation_steps: int

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]: ...
    def training_step(
        self, model: Any, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor: ...
    def floating_point_ops(self, inputs: Batch) -> float: ...
    def _track_num_input_tokens(self, inputs: Batch) -> None: ...
    def _clip_grad_norm(self, model: Any) -> torch.Tensor | float: ...
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any: ...
    def _get_learning_rate(self) -> float: ...
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...
    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...
    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]: ...
    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None: ...


class SaveHooks(Protocol):
    """Methods of the trainer that write the parts of a checkpoint into a folder."""

    model: Any
    optimizer: Any
    callback_handler: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...


class EvalHooks(Protocol):
    """Methods of the trainer that the evaluation loop calls."""

    def prediction_step(
        self, model: Any, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]: ...
    def num_examples(self, dataloader: Any) -> int: ...
    def _prepare_input(self, data: Any) -> Any: ...


class Events(Protocol):
    """Dispatch of a loop's events to the callbacks."""

    def fire(self, event: str, run: Any, **kwargs: Any) -> None: ...


class LoopEngine(Protocol):
    """The part of an engine that the training loop uses."""

    device: torch.device

    def accumulate(self, model: Any, *, sync: bool) -> AbstractContextManager[Any]: ...
    def step(self, optimizer: Any) -> bool: ...
    def zero_grad(self) -> None: ...
    def refresh(self, model: Any) -> None: ...
    def empty_cache(self) -> None: ...
    def is_out_of_memory(self, error: BaseException) -> bool: ...


class RandomStates(Protocol):
    """Random states of this process; `checkpoint.rng` has both functions."""

    def capture(self) -> dict[str, Any]: ...
    def restore(self, states: dict[str, Any]) -> None: ...


class BatchSource(Protocol):
    """The part of a loader that the training loop uses: batches of an epoch, from any position in it.

    Attributes:
        has_ended: the batch that was given last is the last one of its epoch.
    """

    @property
    def has_ended(self) -> bool: ...

    def epoch(self, epoch: int, *, skip_batches: int = 0, after_first: Any = None) -> Iterator[Batch]: ...
    def begin_window(self) -> None: ...
    def rewind(self) -> None: ...


class FirstStepObserver(Protocol):
    """Watches the first step of a run; it changes nothing of it."""

    def window(self, batches: Sequence[Batch]) -> None: ...
    def gradients(self, loss: torch.Tensor) -> None: ...


def definer(owner: object, name: str) -> type | None:
    """The class that defines an attribute of an object; None where the object itself has it, or nobody."""
    if name in vars(owner):
        return None
    return next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)


def is_overridden(owner: object, *names: str) -> bool:
    """Returns True if code outside of this package defines one of these methods, in a subclass or on the object itself.

    Args:
        owner: a trainer.
        names: published hooks.
    """
    home = f"{__name__.partition('.')[0]}."
    for name in names:
        cls = definer(owner, name)
        module = str(getattr(getattr(cls, name, None), "__module__", ""))
        if cls is None or not (cls.__module__.startswith(home) and module.startswith(home)):
            return True
    return False
