"""Published attributes of the trainer behave as plain ones, although other objects own them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import default_collate

from trainwright import Seq2SeqTrainer, Trainer, TrainerControl, TrainerState
from trainwright.run.published import Published

from .._support.small import data, make_trainer, module, train

PUBLISHED = sorted(name for name, value in vars(Trainer).items() if isinstance(value, Published))


def test_the_table_is_found() -> None:
    assert {"state", "control", "accelerator", "callback_handler", "is_in_train", "hp_space"} <= set(PUBLISHED)


@pytest.mark.parametrize("cls", [Trainer, Seq2SeqTrainer])
def test_each_may_be_assigned_before_the_constructor(cls: Any) -> None:
    for name in PUBLISHED:
        trainer = cls.__new__(cls)
        assert not hasattr(trainer, name), name
        with pytest.raises(AttributeError, match=name):
            delattr(trainer, name)
        value = object()
        setattr(trainer, name, value)
        assert getattr(trainer, name) is value, name
        delattr(trainer, name)
        assert not hasattr(trainer, name), name
        setattr(trainer, name, value)
        assert getattr(trainer, name) is value, name


def test_may_be_assigned_before_constructor_in_any_order_and_it_takes_over(tmp_path: Path) -> None:
    for names in (PUBLISHED, PUBLISHED[::-1]):
        names = sorted(names, key=lambda name: name != "_engine")  # the accelerator is the engine's
        made = make_trainer(tmp_path)
        trainer = Trainer.__new__(Trainer)
        values = {name: object() if name != "_engine" else SimpleNamespace() for name in names}
        for name, value in values.items():
            setattr(trainer, name, value)
        assert all(getattr(trainer, name) is value for name, value in values.items())
        Trainer.__init__(trainer, model=made.model, args=made.args, train_dataset=made.train_dataset)
        assert not any(getattr(trainer, name) is value for name, value in values.items())
        assert train(trainer).global_step > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_deleted_one_is_gone_until_it_is_assigned(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = getattr(trainer, name)
    delattr(trainer, name)
    with pytest.raises(AttributeError):
        getattr(trainer, name)
    with pytest.raises(AttributeError, match=f"'Trainer' object has no attribute '{name}'"):
        delattr(trainer, name)
    setattr(trainer, name, before)
    assert getattr(trainer, name) is before


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_patch_is_taken_back(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    before = getattr(trainer, name)
    with mock.patch.object(trainer, name) as patched:
        assert getattr(trainer, name) is patched
    assert getattr(trainer, name) is before
    with pytest.raises(ZeroDivisionError), mock.patch.object(trainer, name, 5):
        raise ZeroDivisionError
    assert getattr(trainer, name) is before
    assert train(trainer).global_step == 2


def test_reading_calls_no_function_of_python() -> None:
    assert "__get__" not in vars(Published)
    assert [name for name in PUBLISHED if type(vars(Trainer)[name].fget).__module__ != "operator"] == []


def log(trainer: Any) -> None:
    trainer.log({"loss": 1.0})
    assert trainer.state.log_history[-1] == {"loss": 1.0, "epoch": 0, "step": 3}
    event, run = trainer.callback_handler.fire.call_args.args
    assert (event, run.control) == ("on_log", trainer.control)


def best_metric(trainer: Any) -> None:
    assert trainer._determine_best_metric({"eval_loss": 0.5}, None)
    assert trainer.state.best_metric == 0.5


def loss(trainer: Any) -> None:
    trainer.label_smoother = trainer.compute_loss_func = None
    trainer.model_accepts_loss_kwargs = False
    trainer.model = module(0.0)
    found = trainer.compute_loss(trainer.model, default_collate(data.vectors(2)))
    assert found.ndim == 0


@pytest.mark.parametrize("use", [log, best_metric, loss])
def test_one_method_runs_on_a_trainer_that_a_test_puts_together(use: Any) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.args = mock.Mock(
        include_num_input_tokens_seen="no",
        greater_is_better=False,
        metric_for_best_model="eval_loss",
        save_strategy="no",
        past_index=-1,
    )
    trainer.accelerator = mock.Mock()
    trainer.state = TrainerState(global_step=3)
    trainer.control = TrainerControl()
    trainer.callback_handler = mock.Mock()
    use(trainer)
