"""The audit: for every published name the same call on both sides, and what it gives in plain values.

A case gets a `Bench` of one side and returns something; `seen` makes it plain, an error included. What differs is in
`DIFFERENT`, with the words that tell it on the page for people who come from transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._support.small import accuracy
from ..contract import surface
from ..parity import data, models
from ..parity.sides import Side

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 2,
    "seed": 3,
    "save_strategy": "steps",
    "save_steps": 5,
    "weight_decay": 0.1,
}


@dataclass
class Bench:
    """A trainer of one side as it was made, and one that has trained."""

    side: Side
    folder: Path

    def make(self, name: str = "run", **more: Any) -> Any:
        parts = {key: more.pop(key) for key in ("compute_metrics", "callbacks", "model_init") if key in more}
        parts.setdefault("compute_metrics", accuracy)
        model = None if "model_init" in parts else models.seeded(lambda: models.ReturnsDict(0.0))
        return self.side.make(
            model,
            self.folder / self.side.name / name,
            SETTINGS | more,
            train_dataset=data.vectors(18),
            eval_dataset=data.vectors(7),
            **parts,
        )

    @cached_property
    def made(self) -> Any:
        return self.make("made")

    @cached_property
    def trained(self) -> Any:
        trainer = self.make("trained")
        trainer.train()
        return trainer

    def checkpoint(self) -> str:
        return str(Path(self.trained.args.output_dir) / "checkpoint-5")

    def files(self, name: str, act: Callable[[Path], Any]) -> Any:
        """What a call writes into a folder, and what it returns."""
        folder = self.folder / self.side.name / name
        folder.mkdir(parents=True, exist_ok=True)
        result = act(folder)
        return result, sorted(path.name for path in folder.iterdir())


def optimized(bench: Bench) -> Any:
    trainer = bench.make("optimized")
    trainer.create_optimizer_and_scheduler(10)
    return trainer


def stepping(bench: Bench) -> Any:
    trainer = optimized(bench)
    trainer.current_gradient_accumulation_steps = 2  # what a run sets
    return trainer


def batch(size: int = 4) -> dict[str, torch.Tensor]:
    rows = data.vectors(size)
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}


def loaded(bench: Bench, act: Callable[[Any, str], Any]) -> Any:
    """A new trainer after it read one thing of a checkpoint."""
    trainer = optimized(bench)
    result = act(trainer, bench.checkpoint())
    return result, trainer.model.state_dict(), trainer.lr_scheduler.state_dict(), len(trainer.optimizer.state)


Case = Callable[[Bench], Any]
METHODS: dict[str, Case] = {
    "train": lambda b: (b.trained.state.global_step, b.trained.model.state_dict()),
    "evaluate": lambda b: b.made.evaluate(),
    "predict": lambda b: b.made.predict(data.vectors(5)),
    "evaluation_loop": lambda b: b.made.evaluation_loop(b.made.get_eval_dataloader(), "Evaluation"),
    "prediction_step": lambda b: b.made.prediction_step(b.made.model, batch(), False),
    "training_step": lambda b: stepping(b).training_step(b.made.model, batch()),
    "compute_loss": lambda b: b.made.compute_loss(b.made.model, batch(), return_outputs=True),
    "get_train_dataloader": lambda b: len(b.made.get_train_dataloader()),
    "get_eval_dataloader": lambda b: list(b.made.get_eval_dataloader()),
    "get_test_dataloader": lambda b: list(b.made.get_test_dataloader(data.vectors(3))),
    "num_examples": lambda b: b.made.num_examples(b.made.get_train_dataloader()),
    "get_batch_samples": lambda b: b.made.get_batch_samples(iter([batch(), batch(2)]), 3, torch.device("cpu")),
    "create_optimizer": lambda b: b.make().create_optimizer().state_dict(),
    "create_optimizer_and_scheduler": lambda b: optimized(b).lr_scheduler.state_dict(),
    "create_scheduler": lambda b: b.make().create_scheduler(10, optimizer=optimized(b).optimizer).get_last_lr(),
    "get_optimizer_cls_and_kwargs": lambda b: b.side.trainer.get_optimizer_cls_and_kwargs(b.made.args),
    "get_decay_parameter_names": lambda b: b.made.get_decay_parameter_names(b.made.model),
    "set_initial_training_values": lambda b: b.made.set_initial_training_values(
        b.made.args, b.made.get_train_dataloader()
    ),
    "get_total_train_batch_size": lambda b: b.made.get_total_train_batch_size(b.made.args),
    "get_sp_size": lambda b: b.made.get_sp_size(),
    "get_cp_size": lambda b: b.made.get_cp_size(),
    "get_tp_size": lambda b: b.made.get_tp_size(),
    "save_model": lambda b: b.files("saved", lambda folder: b.made.save_model(str(folder))),
    "save_state": lambda b: b.trained.save_state(),
    "log": lambda b: (b.made.log({"mine": 1.0}), b.made.state.log_history[-1]),
    "log_metrics": lambda b: b.made.log_metrics("eval", {"eval_loss": 0.5}),
    "save_metrics": lambda b: b.files("made", lambda folder: b.made.save_metrics("eval", {"eval_loss": 0.5}))[0],
    "metrics_format": lambda b: b.side.trainer.metrics_format({"total_flos": 3e9, "train_runtime": 61.5, "n": 3}),
    "store_flos": lambda b: (b.made.store_flos(), b.made.state.total_flos),
    "floating_point_ops": lambda b: b.made.floating_point_ops(batch()),
    "get_learning_rates": lambda b: optimized(b).get_learning_rates(),
    "get_learning_rates without an optimizer": lambda b: b.make().get_learning_rates(),
    "get_num_trainable_parameters": lambda b: b.made.get_num_trainable_parameters(),
    "get_optimizer_group": lambda b: len(optimized(b).get_optimizer_group()),
    "get_optimizer_group without an optimizer": lambda b: b.make().get_optimizer_group(),
    "call_model_init": lambda b: b.make(model_init=lambda: models.ReturnsDict(0.0)).call_model_init(),
    "is_local_process_zero": lambda b: b.made.is_local_process_zero(),
    "is_world_process_zero": lambda b: b.made.is_world_process_zero(),
    "pop_callback": lambda b: b.make().pop_callback(int),
    "evaluate without data": lambda b: b.side.make(models.ReturnsDict(0.0), b.folder, {}).evaluate(),
    "train without data": lambda b: b.side.make(models.ReturnsDict(0.0), b.folder, {}).train(),
    "neither model nor model_init": lambda b: b.side.make(None, b.folder, {}),
    "train from nowhere": lambda b: b.make().train(resume_from_checkpoint=str(b.folder / "nowhere")),
    "train from nothing": lambda b: b.make("nothing").train(resume_from_checkpoint=True),
}
HOOKS: dict[str, Case] = {
    "_get_train_sampler": lambda b: len(b.made._get_train_sampler()),
    "_get_eval_sampler": lambda b: list(b.made._get_eval_sampler(data.vectors(3))),
    "_prepare_inputs": lambda b: b.made._prepare_inputs(batch()),
    # The original names the columns in its error, which it knows once it has looked.
    "_prepare_inputs of nothing": lambda b: (b.made._set_signature_columns_if_needed(), b.made._prepare_inputs({})),
    "_prepare_input": lambda b: b.made._prepare_input([batch(1), (torch.ones(2), "text")]),
    "_get_num_items_in_batch": lambda b: b.made._get_num_items_in_batch([batch(), batch(2)], torch.device("cpu")),
    "_save": lambda b: b.files("_save", lambda folder: b.made._save(str(folder))),
    "_save_optimizer_and_scheduler": lambda b: b.files(
        "_opt", lambda folder: b.trained._save_optimizer_and_scheduler(str(folder))
    ),
    "_save_rng_state": lambda b: b.files("_rng", lambda folder: b.trained._save_rng_state(str(folder))),
    "_load_optimizer_and_scheduler": lambda b: loaded(b, lambda t, path: t._load_optimizer_and_scheduler(path)),
    "_load_from_checkpoint": lambda b: loaded(b, lambda t, path: t._load_from_checkpoint(path)),
    "_load_rng_state": lambda b: loaded(b, lambda t, path: (t._load_rng_state(path), torch.rand(2))),
    "_determine_best_metric": lambda b: b.make(metric_for_best_model="accuracy")._determine_best_metric(
        {"eval_accuracy": 0.5}, None
    ),
    "_determine_best_metric without it": lambda b: b.make(metric_for_best_model="f1")._determine_best_metric(
        {"eval_accuracy": 0.5}, None
    ),
    "_wrap_model": lambda b: type(b.made._wrap_model(b.made.model)).__name__,
    "_get_learning_rate": lambda b: optimized(b)._get_learning_rate(),
    "_get_output_dir": lambda b: Path(b.made._get_output_dir(None)).name,
    "_set_signature_columns_if_needed": lambda b: (
        b.made._set_signature_columns_if_needed(),
        set(b.made._signature_columns),
    ),
}
# Made here from the state of a fresh and of a finished trainer; what cannot be plain is compared by its kind.
STATES: dict[str, Case] = {
    f"{what} of a trainer {when}": lambda b, what=what, when=when: getattr(getattr(b, when), what)  # type: ignore[misc]
    for when in ("made", "trained")
    for what in surface.ATTRIBUTES
    if what != "_signature_columns"  # a list with repetitions there
}

DIFFERENT = {
    "evaluate": "`eval_model_preparation_time`",
    "evaluation_loop": "`eval_model_preparation_time`",
    "predict": "`eval_model_preparation_time`",
    "save_model": "`training_args.json`",
    "_save": "`training_args.json`",
    "optimizer of a trainer trained": "`trainer.optimizer` is the optimizer itself",
}


def seen(case: Case, bench: Bench) -> Any:
    try:
        return plain(case(bench))
    except Exception as error:
        return error


def same(mine: Any, theirs: Any) -> bool:
    """Equal values, up to rounding; of two errors ours may be the narrower kind, and we may have more attributes."""
    if isinstance(theirs, AttributeError) and not isinstance(mine, Exception):
        return True
    if isinstance(mine, Exception) or isinstance(theirs, Exception):
        return isinstance(theirs, Exception) and isinstance(mine, type(theirs))
    return _close(mine, theirs)


def _close(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_close(value, theirs[key]) for key, value in mine.items())
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-6)
    return bool(mine == theirs)


def plain(value: Any) -> Any:
    """Numbers, texts and containers; times are left out, files are named, other objects are their kind."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        clock = ("runtime", "per_second")
        return {str(key): plain(one) for key, one in value.items() if not str(key).endswith(clock)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return value.__name__
    return "callable" if callable(value) and not isinstance(value, torch.nn.Module) else type(value).__name__
