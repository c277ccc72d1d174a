"""A run that is cut off, by a signal in an evaluation, by an error, or by the clock, goes on as if it had not been."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainwright import EarlyStoppingCallback, Trainer, TrainerCallback, get_last_checkpoint
from trainwright.journal.record import read

from .._support.small import (
    Augmented,
    StopAt,
    data,
    differing,
    make_trainer,
    models,
    sign_again,
    weights,
    without_clock,
)
from .test_resume_exact import DATA

CLOCKS = ("_runtime", "_per_second")


def log_of(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in without_clock(trainer.state.log_history) if "train_loss" not in entry]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def signalled(trainer: Any, number: signal.Signals = signal.SIGTERM, *, code: int = 143) -> None:
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == code


class Broken(Exception):
    pass


# -- evaluations -----------------------------------------------------------------------------------------------------

EVALUATED: dict[str, dict[str, Any]] = {
    "by-steps": {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6},
    "by-steps-with-a-save": {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6},
    "by-epoch": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "on-start": {
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 6,
    },
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    },
    "best-by-steps": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
    },
}


def interrupted_evaluation(at: int, base: type[Trainer] = Trainer) -> type[Trainer]:
    class Interrupted(base):  # type: ignore[misc, valid-type]
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step >= at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().prediction_step(*args, **kwargs)

    return Interrupted


def evaluated(folder: Path, cls: type[Trainer] = Trainer, **settings: Any) -> Any:
    parts = {"train_dataset": Augmented(data.vectors(26)), "eval_dataset": Augmented(data.vectors(50)[26:])}
    return make_trainer(folder, cls=cls, **{**parts, "learning_rate": 0.05, **settings})


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(name: str, tmp_path: Path) -> None:
    settings = EVALUATED[name]
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    at = 7 if name == "by-epoch" else 6
    signalled(evaluated(tmp_path / "cut", interrupted_evaluation(at), **settings))
    assert get_last_checkpoint(tmp_path / "cut") == str(tmp_path / "cut" / f"checkpoint-{at}")
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert differing(weights(again.model), weights(whole.model)) == {}
    assert set(steps(tmp_path / "whole")) <= set(steps(tmp_path / "cut"))
    assert again.state.best_metric == whole.state.best_metric
    assert again.state.best_global_step == whole.state.best_global_step


class EndsWhenSaved(TrainerCallback):
    """Ends the process as soon as a step is saved, as far as its checkpoint can tell."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise Broken


def own_loader() -> dict[str, Any]:
    loader = DataLoader(Augmented(data.vectors(26)), batch_size=4, shuffle=True)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    return {"cls": Own, "train_dataset": loader.dataset}


SAVED_AGAIN: dict[str, Callable[[], dict[str, Any]]] = {
    **DATA,
    "own loader": own_loader,
    "grouped": lambda: DATA["masked-list"]() | {"train_sampling_strategy": "group_by_length"},
    "workers": lambda: {"train_dataset": Augmented(data.vectors(26)), "dataloader_num_workers": 1},
    "accumulated": lambda: {"train_dataset": Augmented(data.vectors(26)), "gradient_accumulation_steps": 2},
    "three epochs": lambda: {"train_dataset": data.vectors(26), "num_train_epochs": 3},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.process] if kind == "workers" else [])
        for kind in SAVED_AGAIN
        for name in ("by-steps-with-a-save", "by-epoch")
        if "stream" not in kind or name != "by-epoch"  # those here have more than an epoch
    ],
)
def test_the_save_that_is_made_up_for_has_the_position_too(name: str, kind: str, tmp_path: Path) -> None:
    """It comes before the first batch of the resumed run, which a kill may end before its next save."""

    def made(folder: str, cut: bool = False, callbacks: Any = ()) -> Any:
        parts = {"eval_dataset": data.vectors(4), **EVALUATED[name], **SAVED_AGAIN[kind]()}
        if "input_ids" in next(iter(parts["train_dataset"])):
            parts["eval_dataset"] = [{"input_ids": item["input_ids"]} for item in data.ragged_texts(4)]
        base = parts.pop("cls", Trainer)
        cls = interrupted_evaluation(2, base) if cut else base
        return make_trainer(tmp_path / folder, cls=cls, callbacks=[*callbacks], learning_rate=0.05, **parts)

    whole = made("whole")
    whole.train()
    signalled(made("cut", cut=True))
    for _ in range(2):
        with pytest.raises(Broken):
            made("cut", callbacks=[EndsWhenSaved()]).train(resume_from_checkpoint=True)
    again = made("cut")
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert differing(weights(again.model), weights(whole.model)) == {}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("on_train_begin", "list"),
        ("on_train_begin", "augmented-stream"),
        ("on_train_begin", "own loader"),
        ("on_epoch_begin", "masked-columns"),
        ("on_epoch_begin", "three epochs"),
    ],
)
def test_a_callback_may_save_before_the_first_batch(event: str, kind: str, tmp_path: Path) -> None:
    """It draws numbers before, and the run is killed right after."""
    parts = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}

    def made(folder: str, callbacks: Any = ()) -> Any:
        return make_trainer(tmp_path / folder, callbacks=[*callbacks], **{**parts, **SAVED_AGAIN[kind]()})

    def save(*_: Any, **__: Any) -> None:
        torch.rand(1)
        random.random()
        resumed._save_checkpoint(resumed.model, None)
        raise Broken

    whole = made("whole")
    whole.train()
    made("cut", [StopAt(2)]).train()
    callback = TrainerCallback()
    setattr(callback, event, save)
    resumed = made("cut", [callback])
    with pytest.raises(Broken):
        resumed.train(resume_from_checkpoint=True)
    again = made("cut")
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}


@pytest.mark.parametrize("place", ["on_prediction_step", "compute_metrics"])
def test_a_checkpoint_saved_in_an_evaluation_has_the_states_of_training(place: str, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 3, "compute_metrics": lambda _: {}}
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()

    def save(*_: Any, **__: Any) -> dict[str, float]:
        if cut.state.global_step == 6 and not cut.control.should_training_stop:
            torch.rand(1)
            cut._save_checkpoint(cut.model, None)
            cut.control.should_training_stop = True
        return {}

    callback = TrainerCallback()
    setattr(callback, place, lambda *args, **kwargs: save() and None)
    cut = evaluated(tmp_path / "cut", callbacks=[callback], **settings | {"compute_metrics": save})
    cut.train()
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}


@pytest.mark.parametrize("event", ["on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_epoch_end"])
def test_a_save_within_a_step_is_named(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = TrainerCallback()
    setattr(callback, event, lambda *args, **kwargs: trainer._save_checkpoint(trainer.model, None))
    trainer = make_trainer(
        tmp_path, callbacks=[callback], max_steps=2, gradient_accumulation_steps=2, log_level="warning"
    )
    trainer.train()
    is_named = any("saved within step 1, so a resume" in record.getMessage() for record in caplog.records)
    assert is_named is (event not in ("on_step_end", "on_epoch_end"))


def masked(items: list[Any]) -> dict[str, torch.Tensor]:
    """A batch with a random part of its inputs."""
    batch = {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
    batch["x"] = batch["x"] * (torch.rand(batch["x"].shape) < 0.8)
    return batch


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_evaluations_draw_the_same_after_a_resume(persistent: bool, tmp_path: Path) -> None:
    settings = EVALUATED["by-steps-with-a-save"] | {
        "data_collator": masked,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": persistent,
        "max_steps": 18,
    }
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    evaluated(tmp_path / "cut", callbacks=[StopAt(6)], **settings).train()
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)


def test_a_resume_reads_nothing_of_a_checkpoint_that_its_first_save_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EVALUATED["by-steps-with-a-save"] | {"save_async": True}
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    signalled(evaluated(tmp_path / "cut", interrupted_evaluation(6), **settings))
    rename = Path.rename
    is_replacing = threading.Event()

    def slowly(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        if self.name == "checkpoint-6":
            is_replacing.set()
            time.sleep(0.5)  # between the two renames of a commit, on the thread that writes
        return renamed

    class Waits(Augmented):
        def __getitem__(self, index: int) -> Any:
            assert is_replacing.wait(10.0)
            return super().__getitem__(index)

    monkeypatch.setattr(Path, "rename", slowly)
    again = evaluated(tmp_path / "cut", **settings | {"train_dataset": Waits(data.vectors(26))})
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_one_at_the_very_end_too(tmp_path: Path) -> None:
    settings = EVALUATED["by-epoch"]
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    signalled(evaluated(tmp_path / "cut", interrupted_evaluation(14), **settings))
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)


# An evaluation of several parts: what makes them, and the number of predictions of each.
PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "average": ({"average": "ema"}, 2),
    "sets": ({"eval_dataset": {name: Augmented(data.vectors(50)[26:]) for name in "abc"}}, 3),
    "sets and average": (
        {"average": "ema", "eval_dataset": {name: Augmented(data.vectors(50)[26:]) for name in "ab"}},
        4,
    ),
}


class Heard(TrainerCallback):
    """Notes all evaluations, as the callbacks of the runs of one directory hear of them."""

    def __init__(self, heard: list[tuple[int, str]]) -> None:
        self.heard = heard

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.heard.append((state.global_step, next(iter(metrics))))


def cut_in_part(at: int, part: int, error: BaseException | None = None, base: type[Trainer] = Trainer) -> type[Trainer]:
    """Returns a trainer that a signal or an error ends in a part of the evaluation of a step."""

    class Cut(base):  # type: ignore[misc, valid-type]
        parts = 0

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.parts += self.state.global_step == at
            return super().evaluation_loop(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.parts > part:
                if error is not None:
                    raise error
                os.kill(os.getpid(), signal.SIGTERM)
            return super().prediction_step(*args, **kwargs)

    return Cut


@pytest.mark.parametrize("name", ["by-epoch", "best", "best-by-steps"])
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, (_, num) in PARTS.items() for part in range(num)])
def test_an_evaluation_is_done_when_all_its_parts_are(kind: str, part: int, name: str, tmp_path: Path) -> None:
    """Records, best checkpoint and what callbacks hear are those of the run that was not interrupted."""
    metric = {"metric_for_best_model": "loss" if "sets" not in kind else "b_loss", "greater_is_better": False}
    settings = EVALUATED[name] | PARTS[kind][0] | (metric if "best" in name else {})
    told: dict[str, list[tuple[int, str]]] = {"whole": [], "cut": []}

    def made(folder: str, cls: type[Trainer] = Trainer) -> Any:
        return evaluated(tmp_path / folder, cls, **{**settings, "callbacks": [Heard(told[folder])]})

    whole = made("whole")
    whole.train()
    at = 7 if name == "by-epoch" else 6
    signalled(made("cut", cut_in_part(at, part)))
    again = made("cut")
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert told["cut"] == told["whole"]
    assert differing(weights(again.model), weights(whole.model)) == {}
    assert set(steps(tmp_path / "whole")) <= set(steps(tmp_path / "cut"))
    assert again.state.best_metric == whole.state.best_metric
    assert again.state.best_global_step == whole.state.best_global_step
    journals = [read(tmp_path / folder).values for folder in ("whole", "cut")]
    evaluations = [name for name in journals[0] if name.startswith("eval_") and not name.endswith(CLOCKS)]
    assert evaluations
    assert all(journals[1][name] == journals[0][name] for name in evaluations)


def test_an_error_in_a_later_part_loses_no_part_either(tmp_path: Path) -> None:
    settings = EVALUATED["best-by-steps"] | PARTS["average"][0] | {"save_on_exception": True}
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    with pytest.raises(Broken):
        evaluated(tmp_path / "cut", cut_in_part(6, 1, Broken()), **settings).train()
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert again.state.best_global_step == whole.state.best_global_step


def test_patience_that_ran_out_in_the_first_part_ends_the_resumed_run(tmp_path: Path) -> None:
    """Its callback heard of that part in the run before, and is not notified again."""
    settings = {**EVALUATED["best-by-steps"], "greater_is_better": True, "average": "ema"}

    def impatient(folder: str, cls: type[Trainer] = Trainer) -> Any:
        return evaluated(tmp_path / folder, cls, callbacks=[StopsInEvaluation(6)], **settings)

    whole = impatient("whole")
    whole.train()
    assert whole.state.global_step == 6
    signalled(impatient("cut", cut_in_part(6, 1)))
    again = impatient("cut")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert log_of(again) == log_of(whole)
    longer = impatient("cut")
    longer.args.num_train_epochs += 1
    longer.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert longer.state.global_step == 6


class StopsInEvaluation(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.at and "eval_loss" in metrics:
            control.should_training_stop = True


def test_more_steps_go_on_after_evaluation_that_was_cut_off_at_end(tmp_path: Path) -> None:
    """The last step had set the flag to stop, not a part of the evaluation."""
    settings = EVALUATED["by-epoch"] | PARTS["average"][0] | {"lr_scheduler_type": "constant"}
    signalled(evaluated(tmp_path, cut_in_part(14, 1), **settings))
    again = evaluated(tmp_path, **settings, num_train_epochs=3)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 21


class EvaluatesAnother(TrainerCallback):
    """Evaluates further sets when it hears of an evaluation."""

    trainer: Any = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if "eval_loss" in metrics:
            for name in "xy":
                self.trainer.evaluate(Augmented(data.vectors(40)[26:]), metric_key_prefix=f"eval_{name}")


class EvaluatesTwice(Trainer):
    """Has a second set of its own."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        found = super().evaluate(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        return found | super().evaluate(Augmented(data.vectors(40)[26:]), metric_key_prefix=f"{prefix}_own")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["callback", "subclass"])
def test_parts_of_callbacks_and_subclasses_are_parts_too(kind: str, part: int, tmp_path: Path) -> None:
    settings = EVALUATED["best-by-steps"] | PARTS["average"][0]

    base = EvaluatesTwice if kind == "subclass" else Trainer

    def made(folder: str, cls: type[Trainer] = base) -> Any:
        if kind == "subclass":
            return evaluated(tmp_path / folder, cls, **settings)
        callback = EvaluatesAnother()
        callback.trainer = evaluated(tmp_path / folder, cls, callbacks=[callback], **settings)
        return callback.trainer

    whole = made("whole")
    whole.train()
    signalled(made("cut", cut_in_part(6, part, base=base)))
    again = made("cut")
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)
    assert again.state.best_global_step == whole.state.best_global_step


@pytest.mark.parametrize("evaluation", [3, [], {"logged": "x", "told": 3, "flags": 3}, {"told": [[], "a", None]}])
def test_a_record_with_other_parts_is_not_believed(evaluation: Any, tmp_path: Path) -> None:
    settings = EVALUATED["by-steps"]
    whole = evaluated(tmp_path / "whole", **settings)
    whole.train()
    signalled(evaluated(tmp_path / "cut", interrupted_evaluation(6), **settings))
    path = tmp_path / "cut" / "checkpoint-6" / "trainer_state.json"
    record = json.loads(path.read_text())
    record["stateful_callbacks"]["TrainerControl"]["attributes"]["evaluation"] = evaluation
    path.write_text(json.dumps(record))
    sign_again(path.parent)
    again = evaluated(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(whole)


def test_patience_that_runs_out_in_it_ends_the_run(tmp_path: Path) -> None:
    settings = {**EVALUATED["best-by-steps"], "greater_is_better": True}  # so the falling loss never gets better

    def impatient(folder: str, cls: type[Trainer] = Trainer) -> Any:
        return evaluated(tmp_path / folder, cls, callbacks=[EarlyStoppingCallback(1)], **settings)

    whole = impatient("whole")
    whole.train()
    last = whole.state.global_step
    assert last < 14, "it was never impatient"
    signalled(impatient("cut", interrupted_evaluation(last)))
    again = impatient("cut")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == last
    assert log_of(again) == log_of(whole)


def test_a_save_that_owes_nothing_brings_no_evaluation(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": 1.0}  # and tells no callback

    settings = EVALUATED["by-steps-with-a-save"]
    evaluated(tmp_path, Own, callbacks=[StopAt(6)], **settings).train()
    seen: list[int] = []

    class Counts(Own):
        def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            seen.append(self.state.global_step)
            return super()._evaluate(*args, **kwargs)

    evaluated(tmp_path, Counts, **settings).train(resume_from_checkpoint=True)
    assert seen == [12, 14]


# -- signals at other moments ----------------------------------------------------------------------------------------


def test_a_signal_after_the_last_step_ends_the_process_too(tmp_path: Path) -> None:
    class AtTheEnd(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    signalled(make_trainer(tmp_path, callbacks=[AtTheEnd()], save_strategy="steps", save_steps=7))
    assert steps(tmp_path) == [7, 14]


@pytest.mark.parametrize("at", [6, 7])
def test_a_signal_while_a_save_is_written_in_the_background(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step after it, and in the same: what is on its way is on the disk when the process ends."""
    from trainwright.checkpoint.store import CheckpointStore

    commit = CheckpointStore.commit

    def slowly(self: CheckpointStore, *args: Any, **kwargs: Any) -> Path:
        time.sleep(0.3)
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "commit", slowly)
    settings = {"save_strategy": "steps", "save_steps": 6, "train_dataset": Augmented(data.vectors(26))}
    signalled(make_trainer(tmp_path / "cut", callbacks=[SignalAt(at, signal.SIGTERM)], save_async=True, **settings))
    monkeypatch.undo()
    assert steps(tmp_path / "cut") == sorted({6, at})
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    again = make_trainer(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}


# -- errors ----------------------------------------------------------------------------------------------------------


class BreaksInTraining(Trainer):
    """In the second micro-batch of a step, after dropout has drawn."""

    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        type(self).calls += 1
        if self.calls == 9:
            raise Broken
        return loss


class BreaksInData(Augmented):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 4 * 2 * 4 + 6:
            random.random()
            raise Broken
        return super().__getitem__(index)


class BreaksAt(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self._break)

    def _break(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise Broken


def breaking(kind: str) -> dict[str, Any]:
    if kind == "data":
        return {"train_dataset": BreaksInData(data.vectors(26))}
    if kind.startswith("on_"):
        return {"callbacks": [BreaksAt(kind)]}
    return {"cls": type("Breaks", (BreaksInTraining,), {})}


@pytest.mark.parametrize("kind", ["training", "data", "on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_the_last_finished_step_is_saved_before_an_error_is_raised(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "save_on_exception": True,
        "log_level": "warning",
        "train_dataset": Augmented(data.vectors(26)),
        "include_num_input_tokens_seen": "no",
    }
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    with pytest.raises(Broken):
        make_trainer(tmp_path / "cut", **{**settings, **breaking(kind)}).train()
    assert steps(tmp_path / "cut") == [4]
    assert "ends with Broken after step 4, which is saved" in caplog.text
    again = make_trainer(tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=True)
    if kind != "on_step_end":  # there the log of the step was still to come
        assert log_of(again) == log_of(whole)
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_weights_between_two_steps_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [BreaksAt("on_optimizer_step")]
    trainer = make_trainer(tmp_path, callbacks=callbacks, save_on_exception=True, log_level="warning")
    with pytest.raises(Broken):
        trainer.train()
    assert steps(tmp_path) == []
    assert "after step 4, which is not saved" in caplog.text


def test_without_the_option_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        make_trainer(tmp_path, callbacks=[BreaksAt("on_step_end")]).train()
    assert steps(tmp_path) == []


def test_a_save_that_fails_too_does_not_hide_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            raise OSError("no space left")

    trainer = make_trainer(
        tmp_path, cls=Full, callbacks=[BreaksAt("on_step_end")], save_on_exception=True, log_level="warning"
    )
    with pytest.raises(Broken):
        trainer.train()
    assert "no space left" in caplog.text
    assert steps(tmp_path) == []


def test_callbacks_hear_of_the_error_when_the_step_is_saved(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Hears(TrainerCallback):
        def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            heard.append((type(kwargs["exception"]), steps(tmp_path)))

    with pytest.raises(Broken):
        make_trainer(tmp_path, callbacks=[BreaksAt("on_step_end"), Hears()], save_on_exception=True).train()
    assert heard == [(Broken, [4])]


# -- the cluster -----------------------------------------------------------------------------------------------------


class SignalAt(TrainerCallback):
    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step = step
        self.number = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """A stand-in for Slurm's scontrol on PATH, which writes down how it was called and what it found."""
    folder = tmp_path / "bin"
    calls = tmp_path / "calls"
    folder.mkdir()
    script = folder / "scontrol"
    script.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"found = sorted(p.name for p in pathlib.Path({str(tmp_path / 'run')!r}).glob('checkpoint-*'))\n"
        f"with open({str(calls)!r}, 'a') as file: print(json.dumps([sys.argv[1:], found]), file=file)\n"
        "sys.exit('no such job' if sys.argv[2] == '666' else 0)\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_job_is_queued_again_once_its_checkpoint_is_there(
    number: signal.Signals, scontrol: Callable[[], list[Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path / "run", callbacks=[SignalAt(3, number)], slurm_requeue=True)
    signalled(trainer, code=128 + number)
    assert scontrol() == [[["requeue", "4711"], ["checkpoint-3"]]]


def test_a_person_who_ends_it_wants_it_to_end(scontrol: Callable[[], list[Any]], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", callbacks=[SignalAt(3, signal.SIGINT)], slurm_requeue=True)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    make_trainer(tmp_path / "run", callbacks=[StopAt(2)], slurm_requeue=True).train()
    with pytest.raises(Broken):
        make_trainer(tmp_path / "run", callbacks=[BreaksAt("on_step_end")], slurm_requeue=True).train()
    assert scontrol() == []


@pytest.mark.process
def test_slurm_messages_are_reported(
    scontrol: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "666")
    settings = {"slurm_requeue": True, "log_level": "warning"}
    signalled(make_trainer(tmp_path / "run", callbacks=[SignalAt(3, signal.SIGTERM)], **settings))
    assert "Job 666 could not be put back into the queue: no such job" in caplog.text
    monkeypatch.delenv("SLURM_JOB_ID")
    signalled(make_trainer(tmp_path / "run", callbacks=[SignalAt(3, signal.SIGTERM)], **settings))
    assert "SLURM_JOB_ID is not set" in caplog.text
    assert len(scontrol()) == 1


# -- the clock -------------------------------------------------------------------------------------------------------


class Slow(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)


def test_a_run_that_stops_in_time_is_finished_by_the_next_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_dataset": Augmented(data.vectors(26)), "num_train_epochs": 6}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    first = make_trainer(tmp_path / "cut", callbacks=[Slow()], max_train_time=0.8, **settings)
    out = first.train()
    assert 0 < out.global_step < 42
    assert first.control.should_training_stop
    assert steps(tmp_path / "cut") == [out.global_step]
    again = make_trainer(tmp_path / "cut", max_train_time="1h", **settings)
    again.train(resume_from_checkpoint="auto")
    assert log_of(again) == log_of(whole)
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_checkpoints_come_by_the_clock_without_any_other_interval(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[Slow()], save_every=0.2, save_strategy="no")
    trainer.train()
    assert len(steps(tmp_path)) >= 2


# -- the best of before ----------------------------------------------------------------------------------------------


def test_the_best_is_found_after_all_was_moved(tmp_path: Path) -> None:
    settings = {**EVALUATED["best-by-steps"], "num_train_epochs": 3}

    class WorseAndWorse(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {**super().evaluate(*args, **kwargs), "eval_loss": float(self.state.global_step)}

    before = evaluated(tmp_path / "before", WorseAndWorse, callbacks=[StopAt(9)], **settings)
    before.train()
    best = weights(before.model)
    assert before.state.best_global_step == 3
    shutil.move(tmp_path / "before", tmp_path / "after")
    trainer = evaluated(tmp_path / "after", WorseAndWorse, **settings, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "after" / "checkpoint-3")
    assert differing(weights(trainer.model), best) == {}
    assert steps(tmp_path / "after")[0] == 3


def test_states_of_callbacks_hold_what_they_export_and_nothing_else(tmp_path: Path) -> None:
    settings = EVALUATED["by-steps-with-a-save"] | {"metric_for_best_model": "loss"}
    evaluated(tmp_path, callbacks=[EarlyStoppingCallback(9), StopAt(6)], **settings).train()
    checkpoint = tmp_path / "checkpoint-6"
    record = json.loads((checkpoint / "trainer_state.json").read_text())
    record["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] |= {"on_evaluate": "x", "__class__": "y"}
    (checkpoint / "trainer_state.json").write_text(json.dumps(record))
    sign_again(checkpoint)
    callback = EarlyStoppingCallback(9)
    evaluated(tmp_path, callbacks=[callback], **settings).train(resume_from_checkpoint=str(checkpoint))
    assert "on_evaluate" not in vars(callback)
    record["stateful_callbacks"] = {"EarlyStoppingCallback": "z", "TrainerControl": 3, "TimeLimits": {"attributes": 4}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(record))
    sign_again(checkpoint)
    evaluated(tmp_path, callbacks=[callback], **settings).train(resume_from_checkpoint=str(checkpoint))


def test_going_back_begins_another_run(tmp_path: Path) -> None:
    """Checkpoints of the course that was left are neither deleted nor taken for the newest."""
    often = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    make_trainer(tmp_path, model=models.seeded(lambda: models.ReturnsDict(0.0)), callbacks=[StopAt(8)], **often).train()
    assert steps(tmp_path) == [4, 6, 8]
    back = make_trainer(tmp_path, callbacks=[StopAt(5)], **often)
    back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert steps(tmp_path) == [4, 5, 6, 8]
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
