"""Bad steps that no skipped update repairs, and runs that skip too much: they end in an error, not in a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.capabilities.guard.diagnosis import RATE, STATE, WEIGHTS, find_bad_parts, find_bad_parts_anywhere
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import NonFiniteError

from ...contract import doubles
from .poisoned import BATCH, POISONS, trained, trainer

SAVES = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}


class Writes(trainwright.TrainerCallback):
    """Writes NaN into a part of the run at the end of a step."""

    def __init__(self, part: str, *, step: int) -> None:
        self.part = part
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        optimizer = kwargs["optimizer"]
        group = optimizer.param_groups[0]
        if self.part == "rate":
            group["lr"] = float("nan")
        else:
            optimizer.state[group["params"][0]]["exp_avg"].fill_(torch.nan)


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
@pytest.mark.parametrize("part", ["state", "rate"])
def test_values_that_no_skip_repairs_end_run_at_the_first_bad_step(part: str, policy: str, tmp_path: Path) -> None:
    """They come in after step 2, so step 3 breaks the weights, and step 4 shows it."""
    settings = {**SAVES, "on_nonfinite": policy, "rollback_every": 1, "lr_scheduler_type": "constant"}
    message = r"Step 4: .*Not finite.*: the weights \(.*Skipping steps cannot repair that"
    with pytest.raises(NonFiniteError, match=message):
        trained(tmp_path, settings=settings, callbacks=[Writes(part, step=2)])
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    assert CheckpointStore(tmp_path).non_finite() == ({2} if part == "state" else set())


def test_no_checkpoint_has_such_weights_even_if_it_were_the_first(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"the weights .* and the optimizer state \(exp_avg of body\.0\.weight"):
        trained(tmp_path, settings={**SAVES, "save_steps": 3}, callbacks=[Writes("state", step=2)])
    assert CheckpointStore(tmp_path).steps() == []


@pytest.mark.parametrize("save_async", [False, True], ids=["at once", "in the background"])
def test_a_checkpoint_with_nan_in_the_optimizer_beside_finite_weights_is_marked(
    save_async: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback writes them after the update of step 2, so the save of step 2 has finite weights."""
    with pytest.raises(NonFiniteError):
        trained(tmp_path, settings={**SAVES, "save_async": save_async}, callbacks=[Writes("state", step=2)])
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 2]
    assert store.non_finite() == {2}
    latest = store.latest()
    assert latest is not None
    assert latest.path == store.path(1)
    assert "checkpoint-2 is marked: state.0.exp_avg in optimizer.pt is not finite" in caplog.text


def test_with_ignore_the_optimizer_is_not_looked_at(tmp_path: Path) -> None:
    settings = {**SAVES, "max_steps": 2, "on_nonfinite": "ignore"}
    trained(tmp_path, settings=settings, callbacks=[Writes("state", step=2)])
    assert CheckpointStore(tmp_path).non_finite() == set()


def test_weights_that_the_last_step_broke_are_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="Training ends after step 3"):
        trained(tmp_path, settings={**SAVES, "max_steps": 3}, callbacks=[Writes("state", step=2)])
    assert CheckpointStore(tmp_path).steps() == [1, 2]


def test_a_bad_snapshot_is_not_gone_back_to(tmp_path: Path) -> None:
    settings = {**SAVES, "save_strategy": "no", "on_nonfinite": "rollback", "rollback_every": 3}
    with pytest.raises(NonFiniteError, match=r"the snapshot of step 3 is not better.*the weights"):
        trained(tmp_path, settings=settings, callbacks=[Writes("state", step=2)])


def test_each_part_is_named() -> None:
    model = doubles.model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, doubles.FEATURES), torch.ones(2))["loss"].backward()
    optimizer.step()
    assert find_bad_parts(model, optimizer) == {}
    first = next(model.parameters())
    optimizer.state[first]["exp_avg_sq"].fill_(torch.inf)
    assert find_bad_parts(model, optimizer) == {}, "some optimizers begin with infinity"
    optimizer.state[first]["exp_avg"][0, 0] = torch.nan
    optimizer.param_groups[0]["lr"] = float("inf")
    for parameter in model.parameters():
        parameter.data.fill_(-torch.inf)
    found = find_bad_parts(model, optimizer)
    assert found == {WEIGHTS: "body.0.weight and 5 more", STATE: "exp_avg of body.0.weight", RATE: "inf"}


def test_a_process_without_bad_parts_names_those_of_another() -> None:
    model = doubles.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def find(theirs: dict[str, str]) -> dict[str, str]:
        return find_bad_parts_anywhere(model, optimizer, lambda own: [own, {}, theirs])

    assert find({}) == {}
    assert find({STATE: "exp_avg of body.0.weight"}) == {STATE: "exp_avg of body.0.weight, in process 2"}
    optimizer.param_groups[0]["lr"] = float("nan")
    assert find({WEIGHTS: "body.0.weight"}) == {RATE: "nan"}


class Replaces(trainwright.TrainerCallback):
    """Gives the trainer another optimizer after step 1, and writes NaN into its momentum after step 3."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer.optimizer = torch.optim.SGD(kwargs["model"].parameters(), lr=0.1, momentum=0.9)
        if state.global_step == 3:
            for values in self.trainer.optimizer.state.values():
                values["momentum_buffer"].fill_(torch.nan)


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
def test_the_optimizer_that_a_callback_put_in_is_looked_at(policy: str, tmp_path: Path) -> None:
    callback = Replaces()
    settings = {"max_steps": 8, "on_nonfinite": policy, "save_strategy": "no", "incidents": False}
    callback.trainer = trainer(tmp_path, settings={**settings, "rollback_every": 4}, callbacks=[callback])
    with pytest.raises(NonFiniteError, match=r"the optimizer state \(momentum_buffer of body\.0\.weight"):
        callback.trainer.train()


# -- many skipped steps ----------------------------------------------------------------------------------------------


def bad_but(every: int, number: int) -> dict[int, dict[str, Any]]:
    """Poison in the samples of all steps but each `every`-th one."""
    return {step * BATCH: POISONS["nan"] for step in range(number) if (step + 1) % every}


def test_half_of_the_last_hundred_steps_may_be_skipped_and_no_more(tmp_path: Path) -> None:
    settings = {"max_steps": 120, "incidents": False}
    data = {"poison": bad_but(10, 120), "size": 240}
    with pytest.raises(NonFiniteError, match=r"51 of the last 100 steps were skipped \(max_skipped_share=0.5\)"):
        trainer(tmp_path, settings=settings, **data).train()
    one = trainer(tmp_path, settings={**settings, "max_skipped_share": 0}, **data)
    one.train()
    assert one.state.global_step == 120


def test_a_run_sums_its_skipped_steps_up_across_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"poison": {0: POISONS["nan"], 4 * BATCH: POISONS["nan"]}}
    settings = {**SAVES, "save_steps": 3, "incidents": False}
    trainer(tmp_path, settings={**settings, "max_steps": 3}, **data).train()
    assert Checkpoint(tmp_path / "checkpoint-3").entry("guard").state()["skipped_steps"] == 1
    again = trainer(tmp_path, settings=settings, **data)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        again.train(resume_from_checkpoint=True)
    counts = {entry["step"]: entry["guard/skipped_steps"] for entry in again.state.log_history if "loss" in entry}
    assert counts == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 2}
    assert "2 of 8 steps had no update: see the warnings above." in caplog.messages


def test_a_run_whose_steps_are_all_bad_is_an_error(tmp_path: Path) -> None:
    data = {"poison": bad_but(100, 5)}
    with pytest.raises(NonFiniteError, match=r"5 of 5 steps had no update.*not trained at all"):
        trainer(tmp_path, settings={"max_steps": 5, "incidents": False}, **data).train()
    trainer(tmp_path, settings={"max_steps": 5, "incidents": False, "max_skipped_steps": 0}, **data).train()
