"""An optimizer's state that does not belong to the run that it is resumed in: refused, or named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import CheckpointError

from .._support.small import StopAt, make_trainer

State = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(folder, callbacks=[StopAt(3)]).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def sign_again(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest is not None
    values = {name: getattr(manifest, name) for name in ("step", "run_id", "cursor")}
    Manifest(**values, files=describe_files(folder)).write(folder)


def change_file(run: Path, name: str, change: Callable[[State], object]) -> None:
    path = run / "checkpoint-3" / name
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    sign_again(path.parent)


def resume(run: Path, caplog: pytest.LogCaptureFixture, *, level: str = "warning", **settings: Any) -> str:
    """Returns the warnings of a run that is resumed from step 3, or all that it says from a level on."""
    caplog.clear()
    with caplog.at_level(level.upper(), logger="trainwright"):
        trainer = make_trainer(run, max_steps=4, log_level=level, **settings)
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert trainer.state.global_step == 4
    return caplog.text


def without(state: State, *indices: int) -> None:
    for index in indices or list(state["state"]):
        del state["state"][index]


def with_steps(state: State, *steps: float) -> None:
    for index, one in enumerate(state["state"].values()):
        one["step"] = torch.tensor(float(steps[index % len(steps)]))


def test_an_unchanged_state_is_resumed_without_a_word(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "optimizer" not in resume(run, caplog)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": "rmsprop"},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adamw_bf16"},
        {"optim": "muon"},
    ],
    ids=str,
)
def test_a_state_that_was_emptied_is_refused(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)], **settings).train()
    change_file(tmp_path, "optimizer.pt", without)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt has no state .* after 3 steps"):
        resume(tmp_path, caplog, **settings)


def test_an_optimizer_that_keeps_no_state_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)], optim="sgd").train()
    assert "optimizer" not in resume(tmp_path, caplog, optim="sgd")


def test_parameters_without_a_state_are_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may have had no gradient so far, which no file says: a line for those who ask, no warning."""
    change_file(run, "optimizer.pt", lambda state: without(state, 0))
    assert "has no state for 1 of " in resume(run, caplog, level="info")
    assert "has no state" not in resume(run, caplog)


def test_parameters_with_fewer_steps_than_others_are_no_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_file(run, "optimizer.pt", lambda state: with_steps(state, 3, 1))
    assert "counts 1 to 3 updates" in resume(run, caplog, level="info")
    assert "counts" not in resume(run, caplog)


@pytest.mark.parametrize("steps", [(10**6,), (2,), (3, 10**6), (2, 1), (4,)], ids=str)
def test_steps_that_the_run_did_not_make_are_named(
    steps: tuple[int, ...], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_file(run, "optimizer.pt", lambda state: with_steps(state, *steps))
    said = resume(run, caplog)
    assert "optimizer.pt counts" in said
    assert "3 steps" in said


def test_updates_that_the_loss_scale_skipped_are_no_contradiction(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"scale": 1.0}, run / "checkpoint-3" / "scaler.pt")
    change_file(run, "optimizer.pt", lambda state: with_steps(state, 2))
    assert "optimizer" not in resume(run, caplog)


@pytest.mark.parametrize(
    ("name", "value"), [("eps", 0.5), ("betas", (0.5, 0.6)), ("weight_decay", 3.0), ("amsgrad", True)]
)
def test_settings_that_no_argument_has_are_named(
    name: str, value: Any, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(state: State) -> None:
        state["param_groups"][0][name] = value
        for one in state["state"].values():
            one["max_exp_avg_sq"] = torch.zeros_like(one["exp_avg_sq"])

    change_file(run, "optimizer.pt", change)
    said = resume(run, caplog)
    assert f"{name}={value!r}" in said


def test_a_rate_that_the_schedule_does_not_have_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_file(run, "optimizer.pt", lambda state: state["param_groups"][0].update(lr=0.7))
    said = resume(run, caplog)
    assert "lr=0.7" in said


def test_a_schedule_that_is_elsewhere_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_file(run, "scheduler.pt", lambda state: state.update(last_epoch=10**6))
    assert "schedule of the checkpoint is at step 1000000" in resume(run, caplog)


def test_settings_that_the_arguments_change_are_applied_without_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "optimizer of the checkpoint" not in resume(run, caplog, adam_epsilon=1e-4, weight_decay=0.2, adam_beta1=0.8)
