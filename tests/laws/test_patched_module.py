"""What a library puts in the place of a name of `transformers.trainer` is what runs, under `compat.install()`.

A row of `WRAPPED` is a function or a class of that module; each is wrapped in place, in the original and here, and
called in both. Names that ours has another way for are warned of by name.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations
import transformers.trainer as theirs

import trainwright
import trainwright.compat
import trainwright.trainer as ours
from trainwright.errors import TrainwrightWarning
from trainwright.support import replaced

from .._support.small import data, models
from ..contract import doubles

pytestmark = pytest.mark.filterwarnings("ignore:trainwright.compat.install. came too late")

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
}


def run(folder: Path, *, resume: bool | None = None, predicts: bool = False, **settings: Any) -> Any:
    """Trains with whatever `transformers.trainer` has now."""
    args = theirs.TrainingArguments(str(folder), **{**SETTINGS, "max_steps": 4, **settings})
    data = {"train_dataset": doubles.samples(40), "eval_dataset": doubles.samples(8)}
    trainer = theirs.Trainer(model=doubles.model(), args=args, compute_metrics=lambda p: {"one": 1.0}, **data)
    trainer.train(resume_from_checkpoint=resume)
    if predicts:
        trainer.predict(doubles.samples(8))
    return trainer


def plain(folder: Path) -> None:
    run(folder, eval_strategy="steps", eval_steps=2, predicts=True)


def saved(folder: Path) -> None:
    run(folder, save_strategy="steps", save_steps=2, save_total_limit=1, max_steps=2)
    run(folder, resume=True, save_strategy="steps", save_steps=2)


def deterministic(folder: Path) -> None:
    run(folder, full_determinism=True)
    torch.use_deterministic_algorithms(False)


def grouped(folder: Path) -> None:
    rows = [{"input_ids": [1 + i] * (2 + i % 3), "labels": [1 + i] * (2 + i % 3)} for i in range(8)]
    args = theirs.TrainingArguments(
        str(folder),
        **{**SETTINGS, "max_steps": 2, "per_device_train_batch_size": 1},
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=0.1,
    )
    theirs.Trainer(model=models.llama(), args=args, train_dataset=rows).train()


def rebalanced(folder: Path) -> None:
    rows = [{"input_ids": [1 + i] * 3, "labels": [1 + i] * 3} for i in range(8)]
    args = theirs.TrainingArguments(
        str(folder), **{**SETTINGS, "max_steps": 2}, train_sampling_strategy="batch_rebalance"
    )
    theirs.Trainer(model=models.llama(), args=args, train_dataset=rows).train()


def tokenized(folder: Path) -> None:
    args = theirs.TrainingArguments(str(folder), **{**SETTINGS, "max_steps": 2})
    rows = data.ragged_texts(8)
    bert: Any = models.bert()
    theirs.Trainer(model=bert, args=args, train_dataset=rows, processing_class=data.tokenizer()).train()


def searched(folder: Path) -> None:
    args = theirs.TrainingArguments(str(folder), **{**SETTINGS, "max_steps": 1})
    rows = doubles.samples(8)
    make: Any = doubles.model  # it names a class as its first argument, which is no trial
    trainer = theirs.Trainer(model_init=lambda: make(), args=args, train_dataset=rows, eval_dataset=rows)
    spaces = {"hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}}
    trainer.hyperparameter_search(backend="optuna", n_trials=1, direction="minimize", **spaces)


WRAPPED: dict[str, Callable[[Path], None]] = {
    **dict.fromkeys(
        (
            *("CallbackHandler", "EvalLoopOutput", "EvalPrediction", "PredictionOutput", "PrinterCallback"),
            *("RandomSampler", "RemoveColumnsCollator", "SequentialSampler", "TrainOutput", "TrainerControl"),
            *("TrainerMemoryTracker", "TrainerState", "can_return_loss", "_parse_optim_args"),
            *("default_data_collator", "denumpify_detensorize", "find_labels", "get_parameter_names"),
            *("get_reporting_integration_callbacks", "get_scheduler", "is_optimizer_factory", "nested_detach"),
            *("set_seed", "speed_metrics"),
        ),
        plain,
    ),
    "enable_full_determinism": deterministic,
    "rotate_checkpoints": saved,
    "get_last_checkpoint": saved,
    "LengthGroupedSampler": grouped,
    "LabelSmoother": grouped,
    "DataCollatorWithPadding": tokenized,
    "align_special_tokens": tokenized,
    "default_compute_objective": searched,
}
# Used too, but only with packages or objects that these runs have not; a comment says where a row of its own is.
ELSEWHERE = {
    "DEFAULT_CALLBACKS",  # below
    "DEFAULT_PROGRESS_CALLBACK",  # below
    "BatchRebalanceSampler",  # several processes
    "apply_liger_kernel",  # on a GPU
}


def wrapper(original: Any, calls: Counter[str], name: str) -> Any:
    if inspect.isclass(original):

        class Wrapped(original):  # type: ignore[misc]  # the class is a row of a table
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                calls[name] += 1
                if not issubclass(original, tuple):
                    super().__init__(*args, **kwargs)

        return Wrapped

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return wrapped


@contextmanager
def installed(library: str) -> Iterator[None]:
    with trainwright.compat.install() if library == "trainwright" else nullcontext():
        yield


def test_every_name_that_is_used_has_a_row() -> None:
    assert WRAPPED.keys() | ELSEWHERE == replaced.USED
    assert [name for name in replaced.USED if not hasattr(theirs, name)] == []


@pytest.mark.framework
@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_wrapped_in_the_module_is_called(name: str, tmp_path: Path) -> None:
    calls: dict[str, Counter[str]] = {library: Counter() for library in ("transformers", "trainwright")}
    for library, counted in calls.items():
        with installed(library), pytest.MonkeyPatch.context() as patch:
            patch.setattr(theirs, name, wrapper(getattr(theirs, name), counted, name))
            WRAPPED[name](tmp_path / library)
    assert calls["transformers"], "the original does not call it"
    assert calls["trainwright"]
    counted = Counter()
    with installed("trainwright"):
        plain(tmp_path / "afterwards")
    assert replaced._replaced == {}


@pytest.mark.parametrize("name", ["get_scheduler", "speed_metrics", "set_seed", "CallbackHandler", "TrainOutput"])
def test_what_is_wrapped_in_our_module_is_called_too(name: str, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, name, wrapper(getattr(ours, name), calls, name))
        args = trainwright.TrainingArguments(str(tmp_path), **SETTINGS, max_steps=1)
        trainwright.Trainer(model=doubles.model(), args=args, train_dataset=doubles.samples(8)).train()
    assert calls[name]
    assert replaced._replaced == {}


@pytest.mark.parametrize("name", ["Accelerator", "DataLoader", "find_executable_batch_size", "EvalLoopContainer"])
def test_what_is_not_used_is_named(name: str) -> None:
    with trainwright.compat.install():
        before = getattr(theirs, name)
        with pytest.warns(TrainwrightWarning, match=rf"transformers\.trainer\.{name} was replaced"):
            setattr(theirs, name, lambda *args: None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            setattr(theirs, name, before)
            theirs.something_new = lambda: None  # type: ignore[attr-defined]
            del theirs.something_new  # type: ignore[attr-defined]
            theirs.logger = logging.getLogger("mine")  # type: ignore[attr-defined]


class StopsAtOne(transformers.TrainerCallback):  # type: ignore[misc]
    """A flow of a library: stops and saves after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = control.should_save = True
        return control


class Says(transformers.TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print("mine")


def assign(module: Any) -> None:
    """The three lines of a library."""
    module.DEFAULT_PROGRESS_CALLBACK = Says
    module.DEFAULT_CALLBACKS = [StopsAtOne]
    module.PrinterCallback = Says


def append(module: Any) -> None:
    module.DEFAULT_CALLBACKS.append(StopsAtOne)
    module.PrinterCallback = Says


@pytest.mark.framework
@pytest.mark.parametrize("change", [assign, append])
@pytest.mark.parametrize("disables_tqdm", [False, True])
@pytest.mark.parametrize("place", ["transformers", "trainwright", "trainwright's own module"])
def test_default_callbacks_are_the_modules(place: str, disables_tqdm: bool, change: Any, tmp_path: Path) -> None:
    library = place.partition("'")[0] if place == "transformers" else "trainwright"
    text = io.StringIO()
    with installed(library):
        module: Any = ours if place.endswith("module") else theirs
        names = ("DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "PrinterCallback")
        before = {name: getattr(module, name) for name in names}
        listed = list(before["DEFAULT_CALLBACKS"])
        try:
            change(module)
            with redirect_stdout(text):
                trainer = run(tmp_path, disable_tqdm=disables_tqdm, save_strategy="steps", save_steps=100, max_steps=3)
        finally:
            for name, value in before.items():
                setattr(module, name, value)
            before["DEFAULT_CALLBACKS"][:] = listed
    assert type(trainer).__module__.partition(".")[0] == library
    assert trainer.state.global_step == 1
    assert (tmp_path / "checkpoint-1").is_dir()
    assert ("mine" in text.getvalue()) == (disables_tqdm or change is assign)
    assert replaced._replaced == {}


@pytest.mark.parametrize("name", ["my_tracker", "tensorboard"])
def test_a_tracker_is_registered_or_replaced_in_the_originals_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(transformers.integrations.INTEGRATION_TO_CALLBACK, name, Says)
    args = trainwright.TrainingArguments(str(tmp_path), **{**SETTINGS, "report_to": [name]})
    trainer = trainwright.Trainer(model=doubles.model(), args=args, train_dataset=doubles.samples(8))
    assert [type(one) for one in trainer.callback_handler.callbacks if isinstance(one, Says)] == [Says]
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"my_tracker.* is not a tracker"):
        trainwright.get_reporting_integration_callbacks("my_tracker")
