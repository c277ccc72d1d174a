"""Our objects count as the original's: `isinstance` with its classes, and callbacks that are removed by them."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import integrations
from transformers.trainer_pt_utils import AcceleratorConfig, LabelSmoother
from transformers.trainer_utils import BestRun, EvalLoopOutput, TrainerMemoryTracker, TrainOutput
from transformers.utils.notebook import NotebookProgressCallback

import trainwright
from trainwright.callbacks.base import overrides

from .._support.small import data, make_trainer
from .._support.subprocesses import run_python

METRICS: dict[str, Any] = {}
OUTPUTS: dict[Any, Any] = {
    transformers.EvalPrediction: trainwright.EvalPrediction(1, 2),
    EvalLoopOutput: trainwright.EvalLoopOutput(1, 2, METRICS, 3),
    transformers.trainer_utils.PredictionOutput: trainwright.PredictionOutput(1, 2, METRICS),
    TrainOutput: trainwright.TrainOutput(1, 2.0, METRICS),
    BestRun: trainwright.BestRun("0", 1.0, {}),
    transformers.TrainerState: trainwright.TrainerState(),
    transformers.TrainerControl: trainwright.TrainerControl(),
    transformers.TrainerCallback: trainwright.TrainerCallback(),
    AcceleratorConfig: trainwright.AcceleratorConfig(),
    LabelSmoother: trainwright.LabelSmoother(),
    TrainerMemoryTracker: trainwright.TrainerMemoryTracker(True),
}
CALLBACKS = (
    transformers.DefaultFlowCallback,
    transformers.EarlyStoppingCallback,
    transformers.PrinterCallback,
    transformers.ProgressCallback,
    NotebookProgressCallback,
)
TRACKERS = [
    name
    for name in dir(trainwright)
    if name.endswith("Callback") and hasattr(integrations.integration_utils, name) and name != "TrainerCallback"
]
HOMES = ("transformers", "transformers.trainer_callback", "transformers.utils.notebook", "transformers.integrations")


@pytest.mark.parametrize("theirs", OUTPUTS, ids=lambda cls: cls.__name__)
def test_an_object_of_ours_is_of_the_originals_class(theirs: Any) -> None:
    ours = OUTPUTS[theirs]
    assert type(ours).__module__.startswith("trainwright.")
    assert isinstance(ours, theirs)
    assert issubclass(type(ours), theirs)
    copy = pickle.loads(pickle.dumps(ours))
    assert type(copy) is type(ours)
    assert repr(copy).partition(" at ")[0] == repr(ours).partition(" at ")[0]


def test_what_a_run_hands_out_is_of_the_originals_classes(tmp_path: Path) -> None:
    given: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        given.append(prediction)
        return {"number": 1.0}

    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(4), compute_metrics=compute_metrics, max_steps=1)
    assert isinstance(trainer.train(), TrainOutput)
    assert isinstance(trainer.predict(data.vectors(4)), transformers.trainer_utils.PredictionOutput)
    assert isinstance(trainer.state, transformers.TrainerState)
    assert isinstance(trainer.control, transformers.TrainerControl)
    assert all(isinstance(one, transformers.TrainerCallback) for one in trainer.callback_handler.callbacks)
    assert given
    assert all(isinstance(one, transformers.EvalPrediction) for one in given)


@pytest.mark.parametrize("theirs", CALLBACKS, ids=lambda cls: cls.__name__)
def test_a_callback_is_found_by_the_originals_class(theirs: Any, tmp_path: Path) -> None:
    ours = getattr(trainwright, theirs.__name__)()
    trainer = make_trainer(tmp_path)
    trainer.remove_callback(type(ours))
    trainer.add_callback(ours)
    assert isinstance(ours, theirs)
    assert trainer.pop_callback(theirs) is ours
    trainer.add_callback(ours)
    trainer.remove_callback(theirs)
    assert ours not in trainer.callback_handler.callbacks
    assert not [event for event in trainwright.callbacks.base.EVENTS if overrides(ours, event) and not has(ours, event)]


def has(callback: Any, event: str) -> bool:
    """Whether a class of ours, not the original's below it, defines an event."""
    return any(event in vars(cls) for cls in type(callback).__mro__ if cls.__module__.startswith("trainwright."))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_is_found_by_the_originals_class(name: str, tmp_path: Path) -> None:
    cls: Any = getattr(trainwright, name)
    theirs = getattr(integrations.integration_utils, name)
    ours = cls.__new__(cls)  # its service need not be installed
    trainer = make_trainer(tmp_path)
    callbacks = trainer.callback_handler.callbacks
    callbacks.append(ours)
    assert trainer.pop_callback(theirs) is ours
    assert not hasattr(ours, "__del__")


def test_a_callback_of_the_originals_class_is_still_itself(tmp_path: Path) -> None:
    """Whoever adds the original's own callback has it called, and removes that one alone."""
    theirs = transformers.EarlyStoppingCallback()
    trainer = make_trainer(tmp_path, callbacks=[theirs])
    assert overrides(theirs, "on_evaluate")
    assert trainer.pop_callback(trainwright.EarlyStoppingCallback) is None
    assert trainer.pop_callback(transformers.EarlyStoppingCallback) is theirs


def test_classes_of_the_user_may_have_both_as_bases() -> None:
    class Both(trainwright.TrainerCallback, transformers.TrainerCallback):  # type: ignore[misc]
        pass

    class Mine(trainwright.EarlyStoppingCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Mine."""

    assert overrides(Mine(), "on_step_end")
    assert not overrides(Both(), "on_step_end")


LATE = """
import sys
import trainwright
import torch
from trainwright import EvalPrediction, PrinterCallback, TrainOutput, TrainerState
objects = [EvalPrediction(1, 2), TrainOutput(1, 2.0, {}), TrainerState(), PrinterCallback()]
assert not [name for name in sys.modules if name.partition(".")[0] == "transformers"]
import transformers
from transformers import trainer_callback, trainer_utils
theirs = [transformers.EvalPrediction, trainer_utils.TrainOutput, transformers.TrainerState]
print(all(map(isinstance, objects, [*theirs, trainer_callback.PrinterCallback])))
"""


@pytest.mark.more
@pytest.mark.process
def test_objects_that_were_made_before_transformers_was_loaded_count_too() -> None:
    assert run_python("-c", LATE).stdout.strip() == "True"


def test_a_module_that_is_loaded_again_changes_nothing() -> None:
    importlib.import_module("transformers.trainer_callback")
    assert isinstance(torch.nn.Linear(1, 1), torch.nn.Module)
    assert trainwright.TrainerCallback.__mro__.count(transformers.TrainerCallback) == 1
