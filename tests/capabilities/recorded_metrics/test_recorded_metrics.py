"""`Trainer.record`: reductions by hand, steps that are given up, evaluations, resumes, and wrong calls."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback
from trainwright.capabilities.recorded_metrics.extension import is_recorded_state
from trainwright.capability_table import FILES
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.errors import ArgumentError, CheckpointError, DataError
from trainwright.state.recorded_metrics import COMPACT_AFTER, RecordedMetrics

from ...contract import doubles

STEPS = 6
LOG = 3


def with_metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that counts what it sees."""
    metrics = {"rows": {"value": len(rows), "reduce": "sum"}, "mean_label": {"value": rows[0]["labels"], "weight": 2}}
    return {
        "x": torch.stack([row["x"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
        "_metrics": metrics,
    }


class Records(Trainer):
    """Records numbers of all kinds, and keeps them, to be reduced by hand."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        assert "_metrics" not in inputs
        loss, outputs = super().compute_loss(model, inputs, True, **how)
        items = (inputs["labels"] > 0.3).sum()  # uneven, and 0 for some
        error = (outputs["logits"] - inputs["labels"]).abs().mean()
        self.record("error", error, weight=items)
        self.record("plain", error.item() if self.is_half() else error)
        self.record("items", items, reduce="sum")
        self.record("largest", error, reduce="max")
        self.record("newest", error, reduce="last")
        vars(self).setdefault("kept", []).append((error.item(), items.item(), len(inputs["labels"])))
        return (loss, outputs) if return_outputs else loss

    def is_half(self) -> bool:
        return self.state.global_step % 2 == 0


def expected(kept: list[tuple[float, int, int]]) -> dict[str, float]:
    errors, items, rows = zip(*kept, strict=True)
    return {
        "error": math.fsum(e * n for e, n in zip(errors, items, strict=True)) / sum(items),
        "plain": math.fsum(errors) / len(errors),
        "items": sum(items),
        "largest": max(errors),
        "newest": errors[-1],
        "rows": sum(rows),
    }


def trained(folder: Path, cls: Any = Records, **how: Any) -> Any:
    settings = {"max_steps": STEPS, "logging_steps": LOG, "per_device_train_batch_size": 3, **how.pop("settings", {})}
    trainer = doubles.trainer(folder, cls, settings=settings, data_collator=with_metrics, **how)
    trainer.train(how.get("resume"))
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "items" in entry]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_log_has_the_values_reduced_by_hand(accumulation: int, tmp_path: Path) -> None:
    data = doubles.samples(10)  # in batches of 3: the last one of an epoch has one row, its window fewer batches
    trainer = trained(tmp_path, settings={"gradient_accumulation_steps": accumulation}, train_dataset=data)
    logs = logged(trainer)
    assert [entry["step"] for entry in logs] == [3, 6]
    per_log = len(trainer.kept) // 2
    for number, entry in enumerate(logs):
        by_hand = expected(trainer.kept[number * per_log : (number + 1) * per_log])
        assert {name: entry[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-12)
    assert {size for *_, size in trainer.kept} == {3, 1}


def test_recording_changes_neither_weights_nor_losses(tmp_path: Path) -> None:
    plain = doubles.trainer(tmp_path, settings={"max_steps": STEPS})
    plain.train()
    records = doubles.trainer(tmp_path, Records, settings={"max_steps": STEPS})
    records.train()
    assert doubles.same(doubles.weights(plain), doubles.weights(records))
    for mine, other in zip(plain.state.log_history[:-1], records.state.log_history[:-1], strict=True):
        assert mine.items() <= other.items()


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluations_have_their_prefix_and_leave_training_alone(workers: int, tmp_path: Path) -> None:
    sets = {"a": doubles.samples(7), "b": doubles.samples(4)}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "dataloader_num_workers": workers, "max_steps": 3}
    trainer = trained(
        tmp_path,
        settings={**settings, "per_device_eval_batch_size": 4, "preflight": False},
        eval_dataset=sets,
        compute_metrics=lambda prediction: {"mine": 1.0},
    )
    before = len(trainer.state.log_history)
    trainer.kept.clear()
    metrics = trainer.evaluate()
    by_name = {"a": trainer.kept[:2], "b": trainer.kept[2:]}
    for name, kept in by_name.items():
        by_hand = {f"eval_{name}_{key}": value for key, value in expected(kept).items()}
        assert {key: metrics[key] for key in by_hand} == pytest.approx(by_hand, rel=1e-12)
        assert metrics[f"eval_{name}_mine"] == 1.0
    output = trainer.predict(sets["a"])
    assert output.metrics["test_items"] == metrics["eval_a_items"]
    (train_log,) = [entry for entry in logged(trainer) if "loss" in entry]
    assert train_log["rows"] == 9
    assert len(trainer.state.log_history) == before + 2


def test_a_refused_step_takes_its_numbers_along(tmp_path: Path) -> None:
    data = doubles.samples(24)
    data[7]["labels"] = float("nan")
    settings = {"train_sampling_strategy": "sequential", "max_steps": 6, "logging_steps": 6}
    trainer = trained(tmp_path, settings=settings, train_dataset=data)
    (entry,) = logged(trainer)
    assert entry["guard/skipped_steps"] == 1
    once = [kept for kept in trainer.kept if kept[2] == 3 and not math.isnan(kept[0])]  # the search looks at rows
    by_hand = expected(once)
    assert {name: entry[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-12)
    assert entry["rows"] == 15


class RecordsLate(Trainer):
    """Records its first number in the window after a step, and then runs out of memory once."""

    AFTER = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_full = True
        self.num_marks: list[int] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        self.num_marks.append(len(self._trainwright.run.extensions.mark))
        loss = super().compute_loss(model, inputs, return_outputs, **how)
        if self.state.global_step >= self.AFTER:
            self.record("rows", len(inputs["labels"]), reduce="sum")
            if self.is_full:
                self.is_full = False
                raise torch.cuda.OutOfMemoryError
        return loss


def test_windows_are_marked_from_the_first_number_on_which_a_retry_drops(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "logging_steps": 4, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    trainer = doubles.trainer(tmp_path, RecordsLate, settings=settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rows" in entry]
    assert [entry["rows"] for entry in logs] == [8]
    others = trainer.num_marks[0]
    # two parts for each of the last two windows
    assert trainer.num_marks == [others] * (RecordsLate.AFTER + 1) + [others + 1] * 4


def test_a_step_that_is_refused_late_takes_its_numbers_along() -> None:
    recorded = RecordedMetrics()
    for step in (1, 2):
        recorded.add("a", torch.tensor(float(step)), step=step)
    recorded.add("a", 8.0)
    recorded.drop(1)
    recorded.read_with(torch.zeros(()))
    assert recorded.take() == {"a": 5.0}
    assert recorded.take() == {}


class Callbacks(TrainerCallback):
    """Records at events, with the trainer that it is given."""

    trainer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.record("begun", 1, reduce="sum")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.record("ended", torch.tensor(1, dtype=torch.int64), reduce="sum")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.record("batches", True, reduce="sum")


def test_callbacks_and_compute_metrics_record(tmp_path: Path) -> None:
    callback = Callbacks()

    def compute_metrics(prediction: Any) -> dict[str, float]:
        callback.trainer.record("seen", len(prediction.label_ids), reduce="max")
        return {}

    trainer = callback.trainer = doubles.trainer(
        tmp_path,
        settings={"max_steps": 4, "logging_steps": 2, "per_device_eval_batch_size": 4},
        callbacks=[callback],
        compute_metrics=compute_metrics,
        eval_dataset=doubles.samples(10),
    )
    trainer.record("begun", 100, reduce="sum")  # outside of a training: no effect
    trainer.train()
    assert [(entry["begun"], entry["ended"]) for entry in trainer.state.log_history[:2]] == [(2, 2), (2, 2)]
    metrics = trainer.evaluate()
    assert metrics["eval_seen"] == 10
    assert metrics["eval_batches"] == 3


def test_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 9, "logging_steps": 6}
    whole = trained(tmp_path / "a", settings=settings)
    folder = tmp_path / "a" / "checkpoint-4"
    assert "error" in json.loads((folder / FILES["recorded_metrics"]).read_text())
    resumed = doubles.trainer(
        tmp_path / "a", Records, settings={**settings, "per_device_train_batch_size": 3}, data_collator=with_metrics
    )
    resumed.train(str(folder))
    names = expected(whole.kept)
    assert [{n: e[n] for n in names} for e in logged(whole)] == [{n: e[n] for n in names} for e in logged(resumed)]
    assert len(resumed.kept) == 5
    (folder / FILES["recorded_metrics"]).write_text('{"a": ["median", 1.0, 1.0]}')
    with pytest.raises(CheckpointError, match="holds invalid values"):
        Checkpoint(folder).entry("recorded_metrics").state(is_recorded_state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("loss", 1.0), "'loss' cannot be recorded"),
        (("guard/mine", 1.0), "cannot be recorded"),
        (("", 1.0), "names are text"),
        (("a", 1.0, 1.0, "median"), "reduce='median' of 'a' is not one of: mean, sum, max, last"),
        (("a", 1.0, 2.0, "max"), "with a weight"),
        (("a", 1.0, torch.tensor(2.0), "sum"), "with a weight"),
        (("a", torch.ones(2)), r"tensor of shape \(2,\)"),
        (("a", torch.ones((), dtype=torch.complex64)), "one real number"),
        (("a", [1.0]), "is a list"),
        (("a", "1.0"), "is a str"),
        (("a", 1.0, "2"), "The weight of 'a' is a str"),
        (("known", 1.0), "reduce='mean', and was with 'sum' before"),
    ],
)
def test_a_wrong_call_says_so(arguments: Any, message: str) -> None:
    recorded = RecordedMetrics()
    recorded.add("known", 1.0, reduce="sum")
    with pytest.raises(ArgumentError, match=message):
        recorded.add(*arguments)
    assert recorded.count == 1


def test_what_a_collator_records_is_checked(tmp_path: Path) -> None:
    recorded = RecordedMetrics()
    for wrong, message in ((1.0, "is a float"), ({"a": {"valeu": 1}}, "wrong is valeu"), ({"a": {}}, "wrong is value")):
        with pytest.raises(ArgumentError, match=message):
            recorded.add_from_collator(wrong)
    for share in (0.25, 0.75):  # parts of a micro-batch that was cut have its numbers once
        recorded.add_from_collator({"n": {"value": torch.tensor(4), "reduce": "sum"}, "m": {"value": 3}}, share=share)
    recorded.add("m", 1.0)
    recorded.read_with(torch.zeros(()))
    assert recorded.take() == {"n": 4.0, "m": 2.0}


def test_a_name_of_compute_metrics_is_taken(tmp_path: Path) -> None:
    trainer = doubles.trainer(
        tmp_path, Records, eval_dataset=doubles.samples(4), compute_metrics=lambda prediction: {"plain": 1.0}
    )
    with pytest.raises(DataError, match="'eval_plain' is recorded, but compute_metrics"):
        trainer.evaluate()


def test_a_value_is_the_one_of_the_call_and_keeps_no_graph() -> None:
    recorded = RecordedMetrics()
    counter = torch.zeros((), requires_grad=True)
    for _ in range(COMPACT_AFTER + 3):
        with torch.no_grad():
            counter += 1
        recorded.add("count", counter, weight=torch.tensor(1.0))
    assert recorded.read_with(torch.tensor(0.1)) == torch.tensor(0.1).item()
    assert recorded.take() == {"count": (COMPACT_AFTER + 4) / 2}


def test_three_processes_are_joined_in_one_message_each() -> None:
    parts = [RecordedMetrics() for _ in range(3)]
    parts[0].add("mean", 2.0, 3.0)
    parts[1].add("mean", 6.0, 1.0)
    parts[1].add("only here", -5.0, reduce="max")
    parts[1].add("newest", 1.0, reduce="last")
    parts[2].add("newest", 2.0, reduce="last")
    size = max(part.num_bytes() for part in parts)
    for part in parts:
        part.read_with(torch.zeros(()))
        part.agreed_bytes = size
    messages = torch.stack([part.message() for part in parts])
    results = []
    for part in parts:
        part.receive(messages)
        results.append(part.take())
    assert results == [{"mean": 3.0, "only here": -5.0, "newest": 1.0}] * 3
    parts[0].add("a longer name than was agreed on, and more of it " * 9, 1.0)
    parts[0].read_with(torch.zeros(()))
    assert not parts[0].message().any()
    assert len(parts[0].take()) == 1  # it waits for the next exchange
