"""What a resume does with arguments that differ from the checkpoint's: they take effect, and it is said which do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from trainwright.errors import CheckpointError, CheckpointNotFoundError

from .._support.small import (
    REFERENCE,
    Augmented,
    StopAt,
    data,
    differing,
    make_trainer,
    models,
    sign_again,
    trained_trainer,
    weights,
)

pytestmark = pytest.mark.costly


def rates(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry}


def first(folder: Path, stop_at: int = 6, **settings: Any) -> Any:
    return trained_trainer(folder, callbacks=[StopAt(stop_at)], **settings)


def resumed(folder: Path, asked: Any = True, **settings: Any) -> Any:
    return trained_trainer(folder, resume=asked, **settings)


# -- the length ------------------------------------------------------------------------------------------------------


def test_extending_a_finished_run_continues_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of the promise: 20 steps at a peak of 1e-3, then 40."""
    settings = {"learning_rate": 1e-3, "num_train_epochs": 99, "save_strategy": "steps", "save_steps": 20}
    make_trainer(tmp_path, max_steps=20, **settings).train()
    found = rates(resumed(tmp_path, max_steps=40, disable_tqdm=False, log_level="warning", **settings))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    new = "max_steps 20 -> 40 steps; the rate continues from its current value to the new end, without a jump"
    assert said == [f"changed   {new}"]
    assert found[20] == pytest.approx(5e-5)
    assert found[21] == pytest.approx(5e-5)
    assert found[31] == pytest.approx(2.5e-5)
    assert all(later <= earlier for earlier, later in zip(list(found.values()), list(found.values())[1:], strict=False))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_an_extended_run_that_is_interrupted_ends_the_same(schedule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_dataset": Augmented(data.vectors(26)), "lr_scheduler_type": schedule}
    first(tmp_path, stop_at=9, **settings)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    through = resumed(tmp_path, num_train_epochs=4, **settings)
    cut = make_trainer(tmp_path / "copy", num_train_epochs=4, callbacks=[StopAt(17)], **settings)
    cut.train(resume_from_checkpoint=True)
    again = resumed(tmp_path / "copy", num_train_epochs=4, **settings)
    assert through.state.global_step == again.state.global_step == 28
    assert rates(again) == rates(through)
    assert differing(weights(again.model), weights(through.model)) == {}


def test_more_epochs_after_the_last_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="epoch").train()
    trainer = resumed(tmp_path, num_train_epochs=3, save_strategy="epoch")
    assert (trainer.state.global_step, trainer.state.max_steps, trainer.state.num_train_epochs) == (21, 21, 3)
    assert rates(trainer)[15] == rates(trainer)[14]


@pytest.mark.framework
def test_a_checkpoint_of_transformers_is_extended_too(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 14}
    make_trainer(tmp_path, side=REFERENCE, **settings).train()
    found = rates(resumed(tmp_path, num_train_epochs=4, **settings))
    assert found[15] == found[14]


# -- the arguments ---------------------------------------------------------------------------------------------------


def test_a_changed_learning_rate_takes_effect_at_the_schedules_position(tmp_path: Path) -> None:
    first(tmp_path)
    found = rates(resumed(tmp_path, learning_rate=2e-2))
    assert [found[step] for step in (6, 7, 14)] == pytest.approx([1e-2 * 9 / 14, 2e-2 * 8 / 14, 2e-2 / 14])


@pytest.mark.framework
def test_so_does_one_on_a_checkpoint_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, side=REFERENCE, save_strategy="steps", save_steps=6, save_total_limit=9).train()
    shutil.rmtree(tmp_path / "checkpoint-12")
    shutil.rmtree(tmp_path / "checkpoint-14")
    trainer = resumed(tmp_path, learning_rate=2e-2, disable_tqdm=False, log_level="warning")
    assert rates(trainer)[7] == pytest.approx(2e-2 * 8 / 14)
    assert "changed   learning_rate 0.01 -> 0.02: from here on" in capsys.readouterr().out


def test_settings_of_the_optimizer_take_effect(tmp_path: Path) -> None:
    first(tmp_path, weight_decay=0.1, adam_beta2=0.99)
    same = resumed(tmp_path, weight_decay=0.1, adam_beta2=0.99)
    trainer = resumed(tmp_path, str(tmp_path / "checkpoint-6"), weight_decay=0.3, adam_beta2=0.9)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    assert differing(weights(trainer.model), weights(same.model))


def test_intervals_passed_now_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    first(tmp_path, logging_steps=1, save_strategy="steps", save_steps=3)
    trainer = resumed(
        tmp_path,
        logging_steps=4,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=4,
        eval_dataset=data.vectors(4),
    )
    entries = [entry for entry in trainer.state.log_history if entry["step"] > 6]
    assert [entry["step"] for entry in entries if "loss" in entry] == [8, 12]
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [8, 12, 14]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-10", "checkpoint-14"}
    assert (trainer.state.logging_steps, trainer.state.save_steps, trainer.state.eval_steps) == (4, 5, 4)


def test_what_differs_is_printed_once_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first(tmp_path, save_strategy="steps", save_steps=3)
    capsys.readouterr()
    resumed(tmp_path, learning_rate=5e-3, logging_steps=2, num_train_epochs=3, disable_tqdm=False, log_level="warning")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    names = [line.split()[1] for line in said]
    assert names == ["num_train_epochs", "learning_rate", "logging_steps", "save_strategy", "save_steps"]
    assert "learning_rate 0.01 -> 0.005: from here on, with the schedule's position kept" in said[1]
    assert said[0].endswith("14 -> 21 steps; the rate continues from its current value to the new end, without a jump")
    resumed(
        tmp_path,
        str(tmp_path / "checkpoint-6"),
        save_strategy="steps",
        save_steps=3,
        disable_tqdm=False,
        log_level="warning",
    )
    assert "changed" not in capsys.readouterr().out


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    first(tmp_path)
    with pytest.raises(CheckpointError, match=r"optim='sgd'.*optim='adamw_torch_fused'.*new run"):
        resumed(tmp_path, optim="sgd")
    assert resumed(tmp_path, optim="adamw_torch").state.global_step == 14


def test_another_model_is_refused(tmp_path: Path) -> None:
    first(tmp_path)

    class Wider(models.ReturnsDict):
        def __init__(self, dropout: float) -> None:
            super().__init__(dropout)
            for name, part in list(self.named_modules()):
                if isinstance(part, nn.Linear):
                    owner = self.get_submodule(name.rpartition(".")[0])
                    setattr(owner, name.rpartition(".")[2], nn.Linear(part.in_features + 1, part.out_features))

    with pytest.raises(CheckpointError, match="do not fit Wider"):
        resumed(tmp_path, model=Wider(0.2))


def test_a_schedule_that_counts_otherwise_is_refused(tmp_path: Path) -> None:
    first(tmp_path)
    with pytest.raises(CheckpointError, match="lr_scheduler_type='reduce_lr_on_plateau'"):
        resumed(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", eval_dataset=data.vectors(4))


def test_another_schedule_begins_at_its_own_rate(tmp_path: Path) -> None:
    first(tmp_path)
    assert rates(resumed(tmp_path, lr_scheduler_type="constant"))[7] == 1e-2


# -- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_field", [True, False])
def test_the_same_command_starts_and_goes_on(by_field: bool, tmp_path: Path) -> None:
    field = {"resume_from_checkpoint": "auto"} if by_field else {}
    asked = None if by_field else "auto"
    begun = make_trainer(tmp_path / "run", callbacks=[StopAt(5)], **field)
    begun.train(resume_from_checkpoint=asked)
    assert begun.state.global_step == 5
    again = make_trainer(tmp_path / "run", **field)
    again.train(resume_from_checkpoint=asked)
    through = make_trainer(tmp_path / "through")
    through.train()
    assert len([entry for entry in again.state.log_history if "loss" in entry]) == 14
    assert differing(weights(again.model), weights(through.model)) == {}


def test_a_damaged_one_is_skipped_and_named_and_a_named_one_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first(tmp_path, save_strategy="steps", save_steps=3)
    weights_file = tmp_path / "checkpoint-6" / "model.safetensors"
    damaged = bytearray(weights_file.read_bytes())
    damaged[-5] ^= 1
    weights_file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"checkpoint-6.*model\.safetensors was altered"):
        resumed(tmp_path, str(tmp_path / "checkpoint-6"))
    trainer = make_trainer(tmp_path, callbacks=[StopAt(4)], log_level="warning")
    trainer.train(resume_from_checkpoint="auto")
    assert "checkpoint-6 is skipped: model.safetensors was altered" in caplog.text
    assert trainer.state.log_history[3]["step"] == 4
    shutil.rmtree(tmp_path / "checkpoint-3")
    shutil.rmtree(tmp_path / "checkpoint-4")
    fresh = make_trainer(tmp_path, callbacks=[StopAt(2)])
    fresh.train(resume_from_checkpoint="auto")
    assert fresh.state.global_step == 2
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointNotFoundError):
        resumed(tmp_path)


def test_untrusted_arguments_are_not_a_reason_to_fail(tmp_path: Path) -> None:
    first(tmp_path)
    for text in ("[]", "{", json.dumps({"learning_rate": {"a": 1}})):
        (tmp_path / "checkpoint-6" / "training_args.json").write_text(text)
        sign_again(tmp_path / "checkpoint-6")
        trainer = make_trainer(tmp_path, callbacks=[StopAt(7)])
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        assert trainer.state.global_step == 7
