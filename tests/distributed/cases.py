"""What one process and two processes do alike: settings and a run, used by a script and by the tests that judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.parity import data, models
from tests.parity.sides import OURS, Side, without_clock
from torch import nn

from trainwright import EvalPrediction, LossOutput, Trainer

TOTAL = 8  # samples in a micro-batch of all processes
ALWAYS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "num_train_epochs": 2,
    "seed": 5,
    "max_grad_norm": 1.0,
}


class CountsItems(nn.Module):
    """Rows with unequal numbers of labels; the loss is their sum over the number of items of the whole window."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


def rows(size: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(9)
    items = []
    for i in range(size):
        labels = torch.randint(0, 4, (5,), generator=generator)
        labels[1 + i % 5 :] = -100
        items.append({"x": torch.randn(5, 3, generator=generator), "labels": labels})
    return items


# name -> (model, samples, settings). 22 and 17 leave tails: of 6 samples, and of one that only one process gets.
WINDOWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "means": (lambda: models.ReturnsDict(0.0), data.vectors(22), {}),
    "means, accumulated": (lambda: models.ReturnsDict(0.0), data.vectors(17), {"gradient_accumulation_steps": 2}),
    "counted": (CountsItems, rows(22), {}),
    "counted, accumulated": (CountsItems, rows(17), {"gradient_accumulation_steps": 2}),
    "told and ignored": (
        models.bert,
        data.texts(22),
        {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1},
    ),
    "weighted": (CountsItems, rows(17), {"loss_weighting": "items"}),
}


def trainer_of(name: str, folder: Path, num_processes: int, side: Side = OURS, **more: Any) -> Any:
    build, items, settings = WINDOWS[name]
    size = {"per_device_train_batch_size": TOTAL // num_processes, "per_device_eval_batch_size": 4}
    parts = {"train_dataset": more.pop("train_dataset", items), "eval_dataset": items[:9], "compute_metrics": accuracy}
    return side.make(models.seeded(build), folder, ALWAYS | settings | size | more, **parts)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    labels = prediction.label_ids
    hits = (prediction.predictions.argmax(-1) == labels)[labels != -100]
    return {"accuracy": float(hits.mean()), "rows": len(labels)}


def outcome(trainer: Any, **how: Any) -> dict[str, Any]:
    """Trains, and says in plain numbers what came of it."""
    out = trainer.train(**how)
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in trainer.model.state_dict().items()},
        "log": without_clock(trainer.state.log_history),
        "loss": out.training_loss,
        "step": out.global_step,
    }


# -- hooks for libraries -----------------------------------------------------------------------------------------------


class Counts:
    """A checkpoint item: windows that this process prepared."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.windows = 0

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank, "windows": self.windows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]
        self.windows = state["windows"]


class Library(Trainer):
    """Replaces windows, counts them in a checkpoint item, records numbers, and says over how many items a loss is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = self.checkpoint_items["counts"] = Counts(self.args.process_index)

    def prepare_window(self, batches: list[Any]) -> list[Any]:
        self.counts.windows += 1
        return batches[::-1]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        mask = inputs["labels"] != -100
        logits = outputs["logits"].detach()
        self.record("highest", logits[mask].max() if mask.any() else -1e9, reduce="max")
        metrics = {"logit": logits[mask].mean(), "rows": {"value": len(inputs["x"]), "reduce": "sum"}}
        said = LossOutput(outputs["loss"], num_items=mask.sum(), metrics=metrics)
        return (said, outputs) if return_outputs else said


def by_train(trainer: Any, resume: Any = None) -> None:
    trainer.train(resume_from_checkpoint=resume)


def by_steps(trainer: Any, resume: Any = None) -> None:
    for step in trainer.steps(resume_from_checkpoint=resume):
        for batch in step.batches:
            step.backward(trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items))
        step.update()


def by_fit_step(trainer: Any, resume: Any = None) -> None:
    while trainer.fit_step(resume_from_checkpoint=resume) is not None:
        pass


def library(folder: Path, num_processes: int, **settings: Any) -> dict[str, Any]:
    """Trains by `train`, `steps` and `fit_step`, resumes by the latter two, and says what came of it.

    Whether weights and logs are the same, bit for bit; the log and the weights; counts of the resumed runs.
    """
    side = Side(OURS.name, Library, OURS.arguments)
    found = []
    counts = []
    saved = str(folder / "by_train" / "checkpoint-2")
    ways = [by_train, by_steps, by_fit_step]
    for how, resume in [*((how, None) for how in ways), (by_steps, saved), (by_fit_step, saved)]:
        name = how.__name__ + ("_resumed" if resume else "")
        trainer = trainer_of(
            "counted, accumulated", folder / name, num_processes, side, save_strategy="steps", save_steps=2, **settings
        )
        how(trainer, resume)
        whole = trainer._trainwright.services.engine.whole_weights(trainer.model)
        state = trainer.model.state_dict() if whole is None else whole
        weights = {name: value.double().flatten().tolist() for name, value in state.items()}
        log = without_clock(trainer.state.log_history)[:-1]
        # Without ZeRO, DeepSpeed tells no norm: it is NaN, which a checkpoint has as None.
        log = [{key: value for key, value in entry.items() if value is not None and value == value} for entry in log]
        found.append((weights, log))
        counts.append([trainer.counts.rank, trainer.counts.windows])
    weights, log = found[0]
    return {
        "same": [one == found[0] for one in found],
        "counts": counts,
        "weights": weights,
        "log": log,
        "step": trainer.state.global_step,
    }


def judged(trainer: Any) -> dict[str, Any]:
    """An evaluation and a prediction."""
    metrics = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    return {
        "metrics": without_clock([metrics])[0],
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
    }
