"""TRL's trainers of pairs on our trainer: DPO for the task preference, and a model that scores for the task reward.

Losses, metrics and the preparation of rows are TRL's, by `trainwright.compat`. Ours are the loop, the checkpoints, and
the loss of each pair for the ledger.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from trainwright import compat
from trainwright._types import Batch, JSONObject
from trainwright.cli.recipe.schema import PreferencePart, Recipe
from trainwright.config.arguments import TrainingArguments
from trainwright.config.fields import value_if_known
from trainwright.errors import ArgumentError, LegacyNameWarning, MissingPackageError
from trainwright.support.loss_normalization import LossOutput

if TYPE_CHECKING:
    from trainwright.cli.tasks.task_objects import TaskObjects
    from trainwright.trainer import Trainer

NEEDS_TRL = "task: {task} needs the package trl: pip install trl"
ASKS_FOR_LOSSES = ("ledger", "curriculum")


class PairClasses(NamedTuple):
    """Classes for a task of pairs."""

    arguments: Any
    trainer: Any


def find_problem(recipe: Recipe) -> str | None:
    """Returns what a task of pairs lacks here, in a sentence; None if it can run."""
    return NEEDS_TRL.format(task=recipe.task) if recipe.spec.is_paired and find_spec("trl") is None else None


def make_arguments(recipe: Recipe, training: JSONObject) -> TrainingArguments:
    """Returns the arguments of TRL for a recipe; what the recipe leaves out has TRL's default."""
    problem = find_problem(recipe)
    if problem is not None:
        raise MissingPackageError(problem)
    given: JSONObject = dict(training)
    if recipe.data.max_length is not None:
        given["max_length"] = recipe.data.max_length
    if recipe.task == "preference":
        part = recipe.preference or PreferencePart()
        given |= {"beta": part.beta, "loss_type": [part.loss_type], "label_smoothing": part.label_smoothing}
    try:
        with warnings.catch_warnings():
            # TRL writes the older names of some settings.
            warnings.simplefilter("ignore", LegacyNameWarning)
            made: TrainingArguments = pair_classes(recipe.task).arguments(**given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"training: {error}") from error
    return made


def make_pair_trainer(
    recipe: Recipe, args: TrainingArguments, parts: TaskObjects, *, adapter: Any = None, **datasets: Any
) -> Trainer:
    """Makes the trainer of a task of pairs.

    Args:
        recipe: the recipe.
        args: as `make_arguments` returns them.
        parts: model, reference and tokenizer.
        adapter: a configuration of peft, from which TRL makes the adapter; None to train the model's weights.
        datasets: `train_dataset` and `eval_dataset`, as the constructor takes them.
    """
    given: JSONObject = dict(datasets)
    # Makes accelerate's state of this process, without which a warning of TRL's constructor is an error.
    assert args.distributed_state is not None
    if recipe.task == "preference" and (adapter is None or parts.reference is not None):
        # Without one, TRL loads the model's files again, and a model from scratch has none.
        given["ref_model"] = copy.deepcopy(parts.model) if parts.reference is None else parts.reference
    made: Trainer = pair_classes(recipe.task).trainer(
        model=parts.model, args=args, processing_class=parts.processing_class, peft_config=adapter, **given
    )
    cast(Any, made).form_of_pairs = parts.pairs
    return made


def find_form(trainer: Trainer) -> str | None:
    """Returns the form of the pairs that a trainer has: text or messages."""
    found: str | None = cast(Any, trainer).form_of_pairs
    return found


class _PairTrainer:
    """What both trainers add to TRL's."""

    # Read by the proof that two processes equal one.
    reason_for_one_process = "a trainer of TRL prepares its rows itself and is not made anew in another process"
    _metrics: dict[str, dict[str, list[float]]]

    def _send_telemetry(self) -> None:
        """Keeps TRL from telling the Hub which trainer is used."""

    def take_logged_metrics(self) -> set[str]:
        """Returns the names of the metrics that `log` would add to the last evaluation, and forgets their values."""
        found = {f"eval_{name}" for name in self._metrics["eval"]}
        self._metrics["eval"].clear()
        return found


@cache
def pair_classes(task: str) -> PairClasses:
    """Returns the classes for a task: TRL's, on our trainer.

    Raises:
        ArgumentError: TRL was imported before, on transformers' trainer.
    """
    from trainwright.trainer import Trainer

    with _installed():
        # Any: TRL's methods have no types
        trl: Any = importlib.import_module("trl")
        dpo_trainer: Any = trl.DPOTrainer
        reward_trainer: Any = trl.RewardTrainer
    if not issubclass(dpo_trainer, Trainer):
        raise ArgumentError(
            "TRL was imported before Trainwright could take its place in it. Call trainwright.compat.install() first."
        )

    class PreferenceTrainer(_PairTrainer, dpo_trainer):  # type: ignore[misc]
        """TRL's DPOTrainer, with the loss of each pair for the ledger."""

        def compute_loss(
            self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if return_outputs or not _keeps_losses(self):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            with _log_probs(self) as kept:
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return LossOutput(loss, sample_losses=_dpo_losses(kept, inputs, self.beta))

        def pair_losses(self, inputs: Batch) -> torch.Tensor:
            """Returns -log σ of the margin of each pair, without gradients: DPO's loss, whatever `loss_type` is."""
            with torch.no_grad(), _log_probs(self) as kept:
                super().compute_loss(self.model, inputs)
            return _dpo_losses(kept, inputs, self.beta)

    class PairRewardTrainer(_PairTrainer, reward_trainer):  # type: ignore[misc]
        """TRL's RewardTrainer, with the loss of each pair for the ledger."""

        def compute_loss(
            self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if return_outputs or not _keeps_losses(self):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return LossOutput(loss, sample_losses=_reward_losses(outputs))

        def pair_losses(self, inputs: Batch) -> torch.Tensor:
            """Returns -log σ of the margin of each pair, without gradients."""
            with torch.no_grad():
                return _reward_losses(super().compute_loss(self.model, inputs, True)[1])

    if task == "preference":
        return PairClasses(trl.DPOConfig, PreferenceTrainer)
    return PairClasses(trl.RewardConfig, PairRewardTrainer)


@contextmanager
def _installed() -> Iterator[None]:
    """Puts our classes where TRL takes transformers' from, while it is imported."""
    if compat.is_installed() or "trl.trainer.dpo_trainer" in sys.modules:
        yield
        return
    with compat.install():
        yield


def _keeps_losses(trainer: Any) -> bool:
    return trainer.model.training and any(value_if_known(trainer.args, name) for name in ASKS_FOR_LOSSES)


@contextmanager
def _log_probs(trainer: Any) -> Iterator[list[torch.Tensor]]:
    """Keeps the log-probabilities of the tokens of a batch: those of the model, then those of the reference."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, given: Any, outputs: Any) -> None:
        kept.append(outputs.log_probs.detach())

    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    handles = [model.register_forward_hook(keep) for model in models]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _dpo_losses(kept: list[torch.Tensor], inputs: Batch, beta: float) -> torch.Tensor:
    """Returns -log σ(β ((c - c₀) - (r - r₀))) of each pair, from the log-probabilities of its answers."""
    length = inputs["completion_mask"].shape[1] - 1
    ratios = kept[0][:, -length:].sum(dim=1) - kept[1][:, -length:].sum(dim=1)
    chosen, rejected = ratios.float().chunk(2)
    return -functional.logsigmoid(beta * (chosen - rejected))


def _reward_losses(outputs: Any) -> torch.Tensor:
    chosen, rejected = outputs.logits.detach().float().squeeze(-1).chunk(2)
    return -functional.logsigmoid(chosen - rejected)
