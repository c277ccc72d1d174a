"""Attributes and methods of the original that scripts and libraries ask for, and signatures of older versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from trainwright import Trainer, TrainerState
from trainwright.state.memory_tracker import TrainerMemoryTracker

from .._support.small import OURS, REFERENCE, data, differing, make_trainer, models, train


def llama_trainer(folder: Path, side: Any = OURS, cls: Any = None, **settings: Any) -> Any:
    return make_trainer(
        folder, side, cls, model=models.seeded(models.llama), train_dataset=data.sequences(8), max_steps=2, **settings
    )


@pytest.mark.framework
@pytest.mark.parametrize("name", ["is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"])
def test_a_flag_of_the_original(name: str, tmp_path: Path) -> None:
    ours, theirs = (getattr(make_trainer(tmp_path, side), name) for side in (OURS, REFERENCE))
    assert bool(ours) == bool(theirs) is False


@pytest.mark.framework
def test_noise_set_on_the_trainer_is_trained_with(tmp_path: Path) -> None:
    outcomes = []
    for side in (OURS, REFERENCE):
        trainer = llama_trainer(tmp_path / side.name, side)
        assert trainer.neftune_noise_alpha is None
        trainer.neftune_noise_alpha = 5.0
        outcomes.append(side.train(trainer))
    without = train(llama_trainer(tmp_path / "without"))
    assert differing(outcomes[0].weights, outcomes[1].weights) == {}
    assert differing(outcomes[0].weights, without.weights) != {}


def test_overrides_of_the_noise_are_called(tmp_path: Path) -> None:
    calls = []

    class Noisy(Trainer):
        def _activate_neftune(self, model: Any) -> Any:
            calls.append("begin")
            return super()._activate_neftune(model)

        def _deactivate_neftune(self, model: Any) -> None:
            calls.append("end")
            super()._deactivate_neftune(model)

    trainer = llama_trainer(tmp_path, cls=Noisy, neftune_noise_alpha=5.0)
    trainer.train()
    assert calls == ["begin", "end"]
    assert trainer.neftune_hook_handle is None


@pytest.mark.framework
def test_the_references_of_a_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    ours = TrainerState()
    theirs = transformers.TrainerState()
    for state in (ours, theirs):
        state.init_training_references(trainer, 7, 3, None)
    names = (
        "max_steps",
        "num_train_epochs",
        "trial_name",
        "trial_params",
        "is_local_process_zero",
        "is_world_process_zero",
    )
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


@pytest.mark.framework
def test_the_memory_tracker_has_its_stages_and_the_memory_of_now() -> None:
    theirs = transformers.trainer_utils.TrainerMemoryTracker(skip_memory_metrics=False)
    ours = TrainerMemoryTracker(skip_memory_metrics=False)
    assert ours.stages == theirs.stages
    assert ours.cpu_mem_used() == pytest.approx(theirs.cpu_mem_used(), rel=0.2)
    assert TrainerMemoryTracker(skip_memory_metrics=True).cpu_mem_used() > 0


@pytest.mark.parametrize("has_default", [False, True])
def test_a_checkpoint_hook_with_metrics_is_called_and_may_pass_them_on(has_default: bool, tmp_path: Path) -> None:
    seen = []

    class Needs(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any) -> None:
            seen.append(metrics)
            super()._save_checkpoint(model, trial, metrics=metrics)

    class HasDefault(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            seen.append(metrics)
            super()._save_checkpoint(model, trial, metrics)

    cls = HasDefault if has_default else Needs
    trainer = make_trainer(tmp_path, cls=cls, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    assert seen == [None, None]
    assert (tmp_path / "checkpoint-2").is_dir()
    trainer._save_checkpoint(SimpleNamespace(), None, {"eval_loss": 1.0})
    assert seen[-1] == {"eval_loss": 1.0}
