"""The law of a window: one that is tried again, dropped or cut off counts once in everything that a run counts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from trainwright import Curriculum, Extension, MicroBatch, Trainer, TrainerCallback
from trainwright._types import EXTENSIONS_NAME
from trainwright.capabilities.ledger.table import columns_in, read_table
from trainwright.capability_table import FILES
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.training_state import load_plain
from trainwright.errors import NonFiniteError
from trainwright.state.recorded_metrics import Total

from .._support.small import StopAt
from ..capabilities.ledger.test_ledger import Classifier
from ..contract import doubles

# Windows of two micro-batches: three steps in an epoch, step 4 is cut.
SIZE = 24
BATCH = 4
LAST = 6
CUT = 4
SKIPPED = (2, 6)  # steps whose loss is not finite: the guard skips their update
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")


class Broken(Exception):
    pass


class Counts:
    """A user's object that counts the samples that it was shown."""

    def __init__(self) -> None:
        self.seen = torch.zeros(SIZE)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class CountsOfAUser(Extension):
    """A user's extension that counts the samples of each micro-batch, and the steps whose update was not made."""

    name = "counts_of_a_user"

    def __init__(self) -> None:
        self.seen = torch.zeros(SIZE)
        self.refused_steps: list[int] = []

    def micro_batch(self, batch: MicroBatch) -> None:
        samples = batch.inputs["i"]
        self.seen.index_add_(0, samples, torch.ones(len(samples)))

    def refused(self, step: int) -> None:
        self.refused_steps.append(step)

    def mark(self) -> dict[str, Any]:
        return {"seen": self.seen.clone(), "refused": list(self.refused_steps)}

    def rewind(self, mark: dict[str, Any]) -> None:
        self.seen = mark["seen"]
        self.refused_steps = mark["refused"]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "refused": self.refused_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewind(state)


class Counting(Trainer):
    """Counts samples in every way that a trainer offers, and fails once in the second micro-batch of step 4."""

    error: BaseException | None = None
    number: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = self.checkpoint_items["counts"] = Counts()
        self.add_extension(CountsOfAUser())
        self.num_batches = 0

    def floating_point_ops(self, inputs: Any) -> float:
        return len(inputs["labels"])

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        samples = inputs.pop("i")
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        step = self.state.global_step + 1
        self.counts.seen.index_add_(0, samples, torch.ones(len(samples)))
        self.record("rows", len(samples), reduce="sum")
        self.record("of_step", torch.tensor(float(step)), weight=len(samples))
        self.record("furthest", samples.max() + 100.0 * step, reduce="max")
        self.record("newest", samples[-1] + 100.0 * step, reduce="last")
        self.num_batches = self.num_batches + 1 if step == CUT else 0
        if self.num_batches == 2 and self.number is not None:
            os.kill(os.getpid(), self.number)
        if self.num_batches == 2 and self.error is not None:
            error = self.error
            type(self).error = None
            raise error
        return loss * float("nan") if step in SKIPPED else loss


class At(TrainerCallback):
    """Sets flags, or raises an error, at an event of a step; once."""

    def __init__(self, event: str, *flags: str, step: int = CUT, error: Exception | None = None) -> None:
        self.flags = flags
        self.step = step
        self.error = error
        self.is_done = False
        setattr(self, event, self._act)

    def _act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 != self.step or self.is_done:
            return
        self.is_done = True
        for flag in self.flags:
            setattr(control, flag, True)
        if not self.flags:
            raise self.error or Broken


class SignalInData(Counting):
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)
        if self.state.global_step + 1 == CUT:
            os.kill(os.getpid(), signal.SIGTERM)
        return found


def rows() -> list[dict[str, Any]]:
    return [{"x": row["x"], "labels": i % 3, "i": i} for i, row in enumerate(doubles.samples(SIZE))]


def by_visits(ledger: Any) -> Any:
    return 1.0 + np.nan_to_num(ledger.mean_loss) + ledger.visits


def make(folder: Path, cls: Any = Counting, callbacks: Any = (), **settings: Any) -> Any:
    settings = {
        "gradient_accumulation_steps": 2,
        "max_steps": LAST,
        "logging_strategy": "no",
        "ledger": True,
        "include_num_input_tokens_seen": "all",
        "save_strategy": "steps",
        "save_steps": LAST,
        "save_async": False,
        "max_grad_norm": 1.0,
        "save_on_exception": True,
        "incidents": False,
        "remove_unused_columns": False,
    } | settings
    model = doubles.model(Classifier)
    model.main_input_name = "x"
    data = Curriculum(rows(), by_visits, every=2, delay=1)
    return doubles.trainer(folder, cls, settings=settings, model=model, train_dataset=data, callbacks=list(callbacks))


def counted(folder: Path, step: int = LAST) -> dict[str, Any]:
    """Returns all counts in the checkpoint of a step, as plain values."""
    checkpoint = folder / f"checkpoint-{step}"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    ledger = columns_in(read_table(checkpoint / FILES["ledger"])[0], checkpoint / FILES["ledger"])
    curriculum = load_plain(checkpoint / FILES["curriculum"])
    weights = {name: value for name, value in curriculum.items() if isinstance(value, torch.Tensor)}
    recorded = Checkpoint(checkpoint).entry("recorded_metrics").state()
    guard = Checkpoint(checkpoint).entry("guard").state()
    extension = load_plain(checkpoint / EXTENSIONS_NAME)[CountsOfAUser.name]
    return {
        **{f"recorded {name}": Total(*total).result for name, total in recorded.items()},
        **{f"ledger {name}": np.nan_to_num(column) for name, column in ledger.items()},
        **{f"curriculum {name}": value.numpy() for name, value in weights.items()},
        "curriculum": [curriculum["asked"], *curriculum["steps"]],
        **{f"guard {name}": value for name, value in guard.items() if name != "accepted"},
        "tokens": state["num_input_tokens_seen"],
        "flos": state["total_flos"],
        "items": load_plain(checkpoint / FILES["checkpoint_items"])["counts"]["seen"].numpy(),
        "extension": extension["seen"].numpy(),
        "refused steps": extension["refused"],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the counts of a run without any event."""
    folder = tmp_path_factory.mktemp("whole")
    make(folder).train()
    counts = counted(folder)
    trained = 2 * BATCH * (LAST - len(SKIPPED))
    assert counts["recorded rows"] == trained == counts["ledger visits"].sum()
    assert counts["flos"] == 2 * BATCH * LAST == counts["items"].sum() == counts["extension"].sum()
    assert counts["refused steps"] == [*SKIPPED]
    assert counts["guard skipped_in_a_row"] == 1
    return counts


def drops(flag: str) -> dict[str, Any]:
    return {"callbacks": [At("on_substep_end", flag, "should_save")]}


CUTS: dict[str, tuple[dict[str, Any], type[BaseException] | None]] = {
    "tried again": ({"error": OUT_OF_MEMORY, "auto_find_batch_size": True, "callbacks": [StopAt(CUT)]}, None),
    "tried again after on_substep_end": (
        {"callbacks": [At("on_substep_end", error=OUT_OF_MEMORY), StopAt(CUT)], "auto_find_batch_size": True},
        None,
    ),
    "tried again after on_pre_optimizer_step": (
        {"callbacks": [At("on_pre_optimizer_step", error=OUT_OF_MEMORY), StopAt(CUT)], "auto_find_batch_size": True},
        None,
    ),
    "dropped": (drops("should_training_stop"), None),
    "error in the loss": ({"error": Broken()}, Broken),
    "error in on_step_begin": ({"callbacks": [At("on_step_begin")]}, Broken),
    "error in on_substep_end": ({"callbacks": [At("on_substep_end")]}, Broken),
    "error before the update": ({"callbacks": [At("on_pre_optimizer_step")]}, Broken),
    "tried again, then an error": (
        {"error": OUT_OF_MEMORY, "auto_find_batch_size": True, "callbacks": [At("on_pre_optimizer_step")]},
        Broken,
    ),
    "signal in the step": ({"number": signal.SIGTERM}, SystemExit),
    "signal while it waits for data": ({"cls": SignalInData}, SystemExit),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_window_counts_once_however_it_is_cut(name: str, tmp_path: Path, whole: dict[str, Any]) -> None:
    """Counts after the resume are those of the run that nothing happened to."""
    settings, error = CUTS[name]
    settings = dict(settings)
    attributes = {one: settings.pop(one) for one in ("error", "number") if one in settings}
    cls = type("Cut", (settings.pop("cls", Counting),), attributes)
    trainer = make(tmp_path, cls, **settings)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error):
            trainer.train()
    again = {one: settings[one] for one in ("auto_find_batch_size",) if one in settings}
    make(tmp_path, **again).train(resume_from_checkpoint=True)
    assert_same(counted(tmp_path), whole)


def test_a_window_that_the_end_of_an_epoch_drops_counts_nowhere(tmp_path: Path) -> None:
    """The next epoch begins, and trains the steps 2 to 4."""
    make(tmp_path, callbacks=[At("on_substep_end", "should_epoch_stop", step=2)], save_steps=4).train()
    counts = counted(tmp_path, 4)
    assert counts["recorded rows"] == 2 * BATCH * 3 == counts["ledger visits"].sum()  # step 2 is skipped
    assert counts["flos"] == 2 * BATCH * 4 == counts["items"].sum() == counts["extension"].sum()
    assert counts["tokens"] == counts["flos"] * doubles.FEATURES


def test_step_whose_error_ends_run_is_not_among_skipped_steps_of_checkpoint(tmp_path: Path) -> None:
    """Step 4 is the third bad one in a row; the checkpoint of step 3 has two, and the resume finds the third again."""

    class Bad(Counting):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (float("nan") if self.state.global_step else 1.0)

    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        make(tmp_path, Bad, max_skipped_steps=3).train()
    assert Checkpoint(tmp_path / "checkpoint-3").entry("guard").state()["skipped_in_a_row"] == 2
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        make(tmp_path, Bad, max_skipped_steps=3).train(resume_from_checkpoint=True)


def test_log_within_a_window_that_is_tried_again_counts_its_tokens_once(tmp_path: Path) -> None:
    class Logs(Counting):
        error = OUT_OF_MEMORY

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"mine": 1.0})
            return super().compute_loss(*args, **kwargs)

    make(tmp_path, Logs, auto_find_batch_size=True).train()
    assert counted(tmp_path)["tokens"] == 2 * BATCH * LAST * doubles.FEATURES


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from rows()


def test_samples_of_window_that_is_dropped_are_the_next_ones_of_stream(tmp_path: Path) -> None:
    seen: list[int] = []

    class Diary(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(inputs.pop("i").tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    def run(callbacks: Any = (), **how: Any) -> list[int]:
        seen.clear()
        settings = {"gradient_accumulation_steps": 2, "remove_unused_columns": False, "max_steps": 3}
        doubles.trainer(
            tmp_path,
            Diary,
            settings=settings,
            model=doubles.model(Classifier),
            train_dataset=Stream(),
            callbacks=callbacks,
        ).train(**how)
        return seen.copy()

    stops = At("on_substep_end", "should_training_stop", "should_save", step=2)
    assert run([stops]) == list(range(3 * BATCH)), "the second window was cut after its first micro-batch"
    assert run(resume_from_checkpoint=True) == list(range(2 * BATCH, 6 * BATCH))


def test_memory_that_is_full_after_the_update_ends_the_run(tmp_path: Path) -> None:
    class Always(TrainerCallback):  # once is not enough: it is called a second time, after memory was freed
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OUT_OF_MEMORY

    with pytest.raises(torch.OutOfMemoryError):
        make(tmp_path, auto_find_batch_size=True, callbacks=[Always()]).train()
