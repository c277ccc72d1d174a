"""A trainer that was pickled or deep-copied trains as the original does, and shares nothing with it that changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import EarlyStoppingCallback, set_seed

from .._support.small import accuracy, data, make_trainer, weights, without_clock

CopyOf = Callable[[Any], Any]
SETTINGS: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "metric_for_best_model": "loss",
    "max_train_time": "1h",  # its callback measures the saves of its own trainer
}


def pickled(trainer: Any) -> Any:
    return pickle.loads(pickle.dumps(trainer))


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    callbacks = [EarlyStoppingCallback(early_stopping_patience=5)]
    eval_set = data.vectors(8)
    return make_trainer(tmp_path, eval_dataset=eval_set, compute_metrics=accuracy, callbacks=callbacks, **SETTINGS)


def kinds_of_callbacks(trainer: Any) -> list[type]:
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def train_from_seed(trainer: Any) -> Mapping[str, Any]:
    set_seed(3)
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize("copy_of", [pickled, copy.deepcopy])
def test_a_copy_from_before_training_trains_to_the_same_weights(copy_of: CopyOf, trainer: Any) -> None:
    trainer.state.total_flos = 7.0
    trainer.control.should_log = True
    trainer.callback_handler.callbacks[1].early_stopping_patience_counter = 2
    untrained = weights(trainer.model)
    copied = copy_of(trainer)
    assert kinds_of_callbacks(copied) == kinds_of_callbacks(trainer)
    assert (copied.state.total_flos, copied.control.should_log) == (7.0, True)
    assert copied.callback_handler.callbacks[1].early_stopping_patience_counter == 2
    assert copied.callback_handler.model is copied.model is not trainer.model

    expected = train_from_seed(trainer)
    assert all(torch.equal(value, untrained[name]) for name, value in copied.model.state_dict().items())
    assert copied.state.global_step == 0
    after = train_from_seed(copied)
    assert not torch.equal(after["body.0.weight"], untrained["body.0.weight"])
    assert all(torch.equal(value, expected[name]) for name, value in after.items())
    assert without_clock(copied.state.log_history) == without_clock(trainer.state.log_history)


def test_a_deep_copy_from_after_training_evaluates_and_trains_on(trainer: Any) -> None:
    trainer.train()
    copied = copy.deepcopy(trainer)
    assert copied.state.global_step == trainer.state.global_step == 14
    assert copied.optimizer.param_groups[0]["params"][0] is next(copied.model.parameters())
    assert without_clock([copied.evaluate()]) == without_clock([trainer.evaluate()])
    expected = train_from_seed(trainer)
    after = train_from_seed(copied)
    assert all(torch.equal(value, expected[name]) for name, value in after.items())


def test_a_shallow_copy_shares_the_engine_and_the_record(trainer: Any) -> None:
    shallow = copy.copy(trainer)
    assert shallow is not trainer
    assert vars(shallow) == vars(trainer)
    assert shallow.callback_handler is trainer.callback_handler


def test_a_tracker_is_made_anew(trainer: Any) -> None:
    from trainwright.trackers.base import TrackerCallback

    class Silent(TrackerCallback):
        name = "silent"

    trainer.add_callback(Silent)
    copied = copy.deepcopy(trainer)
    assert kinds_of_callbacks(copied) == kinds_of_callbacks(trainer)
    assert copied.callback_handler.callbacks[-1] is not trainer.callback_handler.callbacks[-1]


def test_a_pickle_that_names_the_former_module_of_its_parts_loads(trainer: Any) -> None:
    written = pickle.dumps(trainer, protocol=0)
    now = b"trainwright.run.services"
    assert now in written
    loaded = pickle.loads(written.replace(now, b"trainwright.run.build"))
    assert type(loaded) is type(trainer)
