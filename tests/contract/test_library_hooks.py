"""The hooks that `docs/libraries.md` promises to libraries: one test for each, by the table of that page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright import LossOutput, Trainer

from . import doubles

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
ROWS = re.findall(r"^\| `(\w+)` \| [^|]+ \| (0\.\d+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def trained(folder: Path, cls: Any = Trainer, **how: Any) -> Any:
    trainer = doubles.trainer(folder, cls, **how)
    trainer.train()
    return trainer


def is_called(folder: Path, name: str, times: int, *given: str) -> None:
    """An override is called so often, with the arguments that the page of the original's hooks has."""
    calls: list[inspect.BoundArguments] = []
    base = getattr(Trainer, name)

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(inspect.signature(base).bind(self, *args, **kwargs))
        return base(self, *args, **kwargs)

    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    trainer = trained(folder, type("Overrides", (Trainer,), {name: override}), settings=settings)
    if name == "prediction_step":
        trainer.evaluate(doubles.samples(8))
    assert len(calls) == times
    assert set(given) <= calls[0].arguments.keys()


def record(folder: Path) -> None:
    names = ["self", "name", "value", "weight", "reduce"]
    parameters = inspect.signature(Trainer.record).parameters
    assert list(parameters) == names
    assert [parameters[name].default for name in names[3:]] == [1.0, "mean"]

    class Records(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.record("mine", 2.0, 3.0, "mean")
            return super().training_step(*args, **kwargs)

    assert [entry.get("mine") for entry in trained(folder, Records).state.log_history] == [2.0, 2.0, 2.0, None]


def metrics_of_a_batch(folder: Path) -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = trainwright.default_data_collator(rows)
        return {**batch, "_metrics": {"rows": {"value": len(rows), "reduce": "sum"}, "weighed": 1.0}}

    log = trained(folder, data_collator=collate).state.log_history[0]
    assert (log["rows"], log["weighed"]) == (4, 1.0)


def loss_output(folder: Path) -> None:
    names = ["loss", "num_items", "metrics", "outputs", "sample_losses"]
    assert list(inspect.signature(LossOutput).parameters) == names

    class Doubles(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return LossOutput(2 * model(**inputs)["loss"], num_items=4, metrics={"mine": 5.0})

    log = trained(folder, Doubles).state.log_history[0]
    assert log["mine"] == 5.0
    assert log["loss"] == 2 * trained(folder).state.log_history[0]["loss"]


def columns(folder: Path) -> None:
    trainer = trained(folder, type("Named", (Trainer,), {"columns": ("x", "labels")}))
    assert Trainer.columns == ()
    assert trainer._signature_columns == ["x", "labels"]


def required_columns(folder: Path) -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        assert "index" in dict(rows[0])
        return trainwright.default_data_collator([{k: v for k, v in row.items() if k != "index"} for row in rows])

    collate.required_columns = ("index",)  # type: ignore[attr-defined]
    data = [{**row, "index": i, "more": 0} for i, row in enumerate(doubles.samples())]
    assert "index" in trained(folder, data_collator=collate, train_dataset=data)._signature_columns


def compute_loss_func(folder: Path) -> None:
    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs["logits"].sum() * 0.0 + 7.0

    trainer = trained(folder, compute_loss_func=func, settings={"preflight": False})
    assert trainer.state.log_history[0]["loss"] == 7.0


def steps(folder: Path) -> None:
    trainer = doubles.trainer(folder)
    for step in trainer.steps():
        for batch in step.batches:
            loss = trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items)
            step.backward(LossOutput(loss, num_items=4, metrics={"mine": 2.0}))
        step.update()
    plain = trained(folder)
    assert doubles.same(doubles.weights(trainer), doubles.weights(plain))
    assert [entry.get("mine") for entry in trainer.state.log_history] == [2.0, 2.0, 2.0, None]


def fit_step(folder: Path) -> None:
    trainer = doubles.trainer(folder)
    numbers = []
    while (result := trainer.fit_step()) is not None:
        numbers.append(result.step)
    assert numbers == [1, 2, 3]


class Counts:
    """A checkpoint item."""

    def __init__(self) -> None:
        self.uses = 0

    def state_dict(self) -> dict[str, int]:
        return {"uses": self.uses}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.uses = state["uses"]


class Repeats(Trainer):
    """Trains the first micro-batch of each window twice, and counts windows in a checkpoint item."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = self.checkpoint_items["counts"] = Counts()
        self.windows: list[int] = []

    def prepare_window(self, batches: list[Any]) -> list[Any]:
        self.counts.uses += 1
        self.windows.append(len(batches))
        return [batches[0], batches[0]]


def prepare_window(folder: Path) -> None:
    assert list(inspect.signature(Trainer.prepare_window).parameters) == ["self", "batches"]
    trainer = trained(folder, Repeats, settings={"gradient_accumulation_steps": 4})
    assert trainer.windows == [4, 4, 4]
    assert trainer.state.log_history[0]["loss"] == trained(folder).state.log_history[0]["loss"]  # one batch, twice


def checkpoint_items(folder: Path) -> None:
    assert Trainer(args=doubles.arguments(folder), model=doubles.model()).checkpoint_items == {}
    trained(folder, Repeats, settings={"save_strategy": "steps", "save_steps": 2})
    resumed = doubles.trainer(folder, Repeats)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert (resumed.counts.uses, resumed.windows) == (3, [1])


def step_contexts(folder: Path) -> None:
    assert list(inspect.signature(Trainer.step_contexts).parameters) == ["self"]
    depths: list[int] = []

    class Inside(Trainer):
        depth = 0

        @contextmanager
        def entered(self) -> Iterator[None]:
            self.depth += 1
            yield
            self.depth -= 1

        def step_contexts(self) -> Any:
            return [self.entered(), self.entered()]

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            depths.append(self.depth)
            return super().compute_loss(*args, **kwargs)

    trainer = trained(folder, Inside, settings={"gradient_accumulation_steps": 2})
    assert (depths, trainer.depth) == ([2] * 6, 0)


HOOKS: dict[str, Callable[[Path], None]] = {
    "record": record,
    "_metrics": metrics_of_a_batch,
    "LossOutput": loss_output,
    "columns": columns,
    "required_columns": required_columns,
    "steps": steps,
    "fit_step": fit_step,
    "prepare_window": prepare_window,
    "checkpoint_items": checkpoint_items,
    "step_contexts": step_contexts,
    "compute_loss": lambda folder: is_called(folder, "compute_loss", 6, "model", "inputs", "num_items_in_batch"),
    "compute_loss_func": compute_loss_func,
    "training_step": lambda folder: is_called(folder, "training_step", 6, "model", "inputs", "num_items_in_batch"),
    "prediction_step": lambda folder: is_called(
        folder, "prediction_step", 1, "model", "inputs", "prediction_loss_only"
    ),
    "get_batch_samples": lambda folder: is_called(folder, "get_batch_samples", 3, "epoch_iterator", "num_batches"),
    "create_optimizer": lambda folder: is_called(folder, "create_optimizer", 1),
    "create_scheduler": lambda folder: is_called(folder, "create_scheduler", 1, "num_training_steps"),
    "log": lambda folder: is_called(folder, "log", 4, "logs"),
    "_save_checkpoint": lambda folder: is_called(folder, "_save_checkpoint", 1, "model", "trial"),
}


def test_each_hook_of_the_page_has_a_test() -> None:
    assert [name for name, _ in ROWS] == list(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_stable_hook_keeps_its_contract(name: str, tmp_path: Path) -> None:
    HOOKS[name](tmp_path)
