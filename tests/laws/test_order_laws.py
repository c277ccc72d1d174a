"""Whatever was called before, `train()` ends with the same weights, to the bit.

Each engine of one process trains with each option, alone and after other calls of the same trainer; where nothing draws
random numbers, weights, buffers and logged losses are equal. Engines of several processes are in
`test_order_process_laws.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Trainer
from trainwright.distributed.world import World
from trainwright.run import dry_run

from .._support.data_parallel_double import DEVICES
from .._support.small import data, make_trainer, models
from .engines import BACKENDS, Backend

# peft reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
STEPS = 3
SHORT = {"max_steps": STEPS, "save_strategy": "no", "optim": "adamw_torch", "preflight": False}

TEXTS = {"train_dataset": data.texts(26), "eval_dataset": data.texts(8)}

Outcome = tuple[dict[str, torch.Tensor], list[float]]


class Normed(models.Plain):
    """Has running statistics, which a forward pass in training mode changes."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.norm = nn.BatchNorm1d(models.FEATURES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        loss, logits = self.loss_and_logits(self.norm(x), labels)
        return {"loss": loss, "logits": logits}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"hits": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def plain() -> nn.Module:
    return models.seeded(lambda: models.ReturnsDict(0.0))


def with_own_optimizer() -> dict[str, Any]:
    model = plain()
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


def with_adapter() -> dict[str, Any]:
    import peft

    model = models.seeded(models.bert)
    config = peft.LoraConfig(r=2, target_modules=["query"])
    return {"model": models.seeded(lambda: peft.get_peft_model(model, config)), **TEXTS}


# Parts and settings of a trainer, by option.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "accumulating": lambda: {"gradient_accumulation_steps": 2},
    "bf16": lambda: {"bf16": True},
    "fp16": lambda: {"fp16": True},
    "evaluated in bf16": lambda: {"model": models.seeded(models.bert), "bf16_full_eval": True, **TEXTS},
    "compiled": lambda: {"torch_compile": True, "torch_compile_backend": "eager"},
    "running statistics": lambda: {"model": models.seeded(Normed)},
    "own optimizer": with_own_optimizer,
    "optimizer with modes": lambda: {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    "metrics": lambda: {"compute_metrics": accuracy, "eval_strategy": "steps", "eval_steps": 2},
    "averages": lambda: {"average": "ema"},
    "adapter": with_adapter,
    "model_init": lambda: {"model_init": plain},
}


def trainer_of(option: str, folder: Path, **settings: Any) -> Trainer:
    parts = {"model": None if option == "model_init" else plain(), "eval_dataset": data.vectors(8), **SHORT}
    trainer: Trainer = make_trainer(folder, **(parts | OPTIONS[option]() | settings))
    return trainer


# -- orders ------------------------------------------------------------------------------------------------------------


def leave_at_once(trainer: Trainer) -> None:
    """Leaves a loop before its first update."""
    for _step in trainer.steps():
        break


def leave_after_a_pass(trainer: Trainer) -> None:
    """Leaves a loop after a backward pass; its gradients are not part of the next run."""
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items))
        break


def leave_after_a_pass_without_trace(trainer: Trainer) -> None:
    """Puts running statistics back: the caller's own forward pass moved them, which no run undoes."""
    before = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    leave_after_a_pass(trainer)
    for buffer, value in before:
        buffer.copy_(value)


def leave_after_an_update(trainer: Trainer) -> None:
    """Trains, and puts the weights of the beginning back; a new optimizer is asked for."""
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items))
        step.update()
        break
    trainer.model.load_state_dict(before)
    trainer.optimizer = None
    trainer.lr_scheduler = None


def search(trainer: Trainer) -> None:
    trainer.hyperparameter_search(lambda trial: {"learning_rate": 0.1}, backend="optuna", n_trials=1)


ORDERS: dict[str, Callable[[Trainer, Path], object]] = {
    "evaluate": lambda trainer, _: trainer.evaluate(),
    "predict": lambda trainer, _: trainer.predict(trainer.eval_dataset),
    "check": lambda trainer, _: trainer.check(),
    "prove": lambda trainer, _: trainer.prove(num_steps=1),
    "save_model": lambda trainer, folder: trainer.save_model(str(folder / "saved")),
    "a dry run": lambda trainer, _: dry_run.find_metric_names(trainer),
    "steps left at once": lambda trainer, _: leave_at_once(trainer),
    "steps left after a pass": lambda trainer, _: leave_after_a_pass_without_trace(trainer),
    "steps left after an update": lambda trainer, _: leave_after_an_update(trainer),
    "compare_with": lambda trainer, _: trainer.compare_with(trainer, num_steps=1),
    "create_optimizer": lambda trainer, _: trainer.create_optimizer(),
    "a search's trial": lambda trainer, _: search(trainer),
}
# What an order cannot do with an option, and why.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("own optimizer", "steps left after an update"): "the optimizer is not the trainer's to make again",
    ("model_init", "steps left after an update"): "train() makes another model",
}
# What DataParallel on doubles of devices cannot do, and why.
IMPOSSIBLE_IN_COPIES = {
    "compiled": "the doubles have parameters that are no leaves, of which torch warns when it compiles them",
    "compare_with": "it needs a model that can be run without a wrapper",
}


def cases() -> list[Any]:
    """All pairs of options and orders: each order with no option, and each option after an evaluation, are quick."""
    found = []
    for option in OPTIONS:
        for order in ORDERS:
            if (option, order) in IMPOSSIBLE or (order == "a search's trial" and option != "model_init"):
                continue
            is_first = option == "plain" or order in ("evaluate", "a search's trial")
            marks = [pytest.mark.process] if order == "prove" else []
            # The others show the same, and there are two hundred of them.
            marks += [] if is_first else [pytest.mark.slow]
            found.append(pytest.param(option, order, marks=marks))
    return found


def skip_impossible(backend: Backend, *names: str) -> None:
    if not backend.is_exact and (reason := next(filter(None, map(IMPOSSIBLE_IN_COPIES.get, names)), None)):
        pytest.skip(reason)


def outcome(trainer: Trainer) -> Outcome:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}, losses


def assert_same(one: Outcome, other: Outcome, *, within: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=0.0, atol=within)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    chosen: Backend = request.param
    if not chosen.is_exact:
        monkeypatch.setattr(World, "n_gpu", DEVICES)
    logging.getLogger("trainwright").setLevel("ERROR")
    with chosen.devices():
        yield chosen


@functools.cache
def trained(backend: str, option: str, folder: Path) -> Outcome:
    """What `train()` alone comes to; one run for all orders."""
    trainer = trainer_of(option, folder / f"{backend}_{option.replace(' ', '_')}")
    trainer.train()
    return outcome(trainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize(("option", "order"), cases())
def test_a_call_before_training_changes_nothing(
    backend: Backend, option: str, order: str, folder: Path, tmp_path: Path
) -> None:
    skip_impossible(backend, option, order)
    trainer = trainer_of(option, tmp_path)
    ORDERS[order](trainer, tmp_path)
    trainer.train()
    assert_same(outcome(trainer), trained(backend.name, option, folder))


@pytest.mark.smoke
def test_step_that_is_left_keeps_what_forward_pass_wrote_and_nothing_else(backend: Backend, tmp_path: Path) -> None:
    trainer = trainer_of("running statistics", tmp_path)
    weights = {name: value.clone() for name, value in trainer.model.named_parameters()}
    leave_after_a_pass(trainer)
    assert int(trainer.model.norm.num_batches_tracked) > 0
    assert not torch.equal(trainer.model.norm.running_mean, torch.zeros(models.FEATURES))
    torch.testing.assert_close(dict(trainer.model.named_parameters()), weights, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_evaluation_between_two_runs_changes_nothing(backend: Backend, option: str, tmp_path: Path) -> None:
    skip_impossible(backend, option)
    ends = []
    for evaluates in (False, True):
        trainer = trainer_of(option, tmp_path / str(evaluates))
        trainer.train()
        if evaluates:
            trainer.evaluate()
        trainer.train()
        ends.append(outcome(trainer))
    # A schedule-free optimizer moves the weights to its average and back, which rounds.
    assert_same(*ends, within=1e-7 if option == "optimizer with modes" else 0.0)
