"""A bad step: its update is left out to the bit, made and said, or ends the run; a healthy run notices nothing."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.capabilities.guard import step_guard
from trainwright.capabilities.guard.incident_log import IncidentLog
from trainwright.capabilities.guard.plan import GuardPlan
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.errors import NonFiniteError

from ...contract import doubles
from .poisoned import BATCH, POISONS, Hears, LeavesOut, Model, optimizer_of, trained, trainer

BAD_STEP = 3
WHERE = {"host": None, "device": "decided on the device, learned of later"}


def poison_of(step: int, kind: str = "nan", *, micro_batches: int = 1) -> dict[int, dict[str, Any]]:
    return {(step * micro_batches - 1) * BATCH + 1: POISONS[kind]}


def decide_on_the_device(monkeypatch: pytest.MonkeyPatch, *, offloads: bool = False) -> None:
    """Has a run on the CPU use the guard of GPUs, whose flag is then in main memory, or on another device."""

    def make(plan: GuardPlan, report: Any, *, optimizer: Any, device: Any, **facts: Any) -> Any:
        assert step_guard.takes_found_inf(optimizer)
        log = IncidentLog(report, max_skipped=plan.max_skipped_steps, record=facts["record"])
        flag_on = torch.device("meta") if offloads else device
        return step_guard.DeviceGuard(plan.on_nonfinite, log, optimizer, device=flag_on)

    monkeypatch.setattr(step_guard, "make_guard", make)


def schedule_of(one: Any) -> dict[str, Any]:
    return {name: value for name, value in one.lr_scheduler.state_dict().items() if name != "step"}


def same_state(one: Any, other: Any) -> bool:
    ours = one.optimizer.state_dict()["state"]
    theirs = other.optimizer.state_dict()["state"]
    empty = all(not torch.as_tensor(v).any() for state in ours.values() for v in state.values() if v is not None)
    if not theirs:
        return empty
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key][name]))
        for key, state in ours.items()
        for name, value in state.items()
        if value is not None
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", POISONS)
def test_a_skipped_step_leaves_everything_as_before_it(kind: str, micro_batches: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": micro_batches, "max_steps": 6, "logging_steps": 6}
    hears = Hears()
    poison = poison_of(BAD_STEP, kind, micro_batches=micro_batches)
    guarded = trained(tmp_path / "guarded", poison=poison, settings=settings, callbacks=[hears])
    by_hand = trained(
        tmp_path / "hand", settings={**settings, "on_nonfinite": "ignore"}, callbacks=[LeavesOut(BAD_STEP)]
    )
    assert doubles.same(doubles.weights(guarded), doubles.weights(by_hand))
    assert same_state(guarded, by_hand)
    assert schedule_of(guarded) == schedule_of(by_hand)
    assert [(i.kind, i.step, i.action) for i in hears.incidents] == [("nonfinite", BAD_STEP, "skip")]
    assert guarded.state.global_step == 6  # the data moves on
    assert guarded.state.log_history[0]["guard/skipped_steps"] == 1


@pytest.mark.parametrize(
    ("bad_step", "schedule"), [(1, "cosine"), (3, "warmup_stable_decay"), (8, "polynomial")], ids=str
)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-fused", "adagrad-fused", "adamw-bf16"])
def test_both_kinds_of_guard_skip_alike(
    optimizer: str, where: str, schedule: str, bad_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"num_decay_steps": 2} if schedule == "warmup_stable_decay" else {}
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": kwargs, "warmup_steps": 2}
    runs = []
    for name, extra in (("guarded", {"poison": poison_of(bad_step)}), ("hand", {"callbacks": [LeavesOut(bad_step)]})):
        model = doubles.model(Model)
        if where == "device" and not step_guard.takes_found_inf(optimizer_of(model, optimizer)):
            pytest.skip("this version's fused optimizer has no flag for steps to skip")
        if name == "guarded" and where == "device":
            decide_on_the_device(monkeypatch)
        given = settings if name == "guarded" else {**settings, "on_nonfinite": "ignore"}
        runs.append(
            trained(
                tmp_path / name, model=model, settings=given, optimizers=(optimizer_of(model, optimizer), None), **extra
            )
        )
        monkeypatch.undo()
    guarded, by_hand = runs
    assert doubles.same(doubles.weights(guarded), doubles.weights(by_hand))
    assert same_state(guarded, by_hand)
    assert schedule_of(guarded) == schedule_of(by_hand)
    assert not hasattr(guarded.optimizer, "found_inf")


def test_an_optimizer_that_knows_no_flag_is_guarded_too(tmp_path: Path) -> None:
    weights = []
    for name, extra in (("guarded", {"poison": poison_of(2)}), ("hand", {"callbacks": [LeavesOut(2)]})):
        model = doubles.model(Model)
        one = trained(tmp_path / name, model=model, optimizers=(optimizer_of(model, "rmsprop"), None), **extra)
        weights.append(doubles.weights(one))
    assert doubles.same(*weights)


@pytest.mark.parametrize("where", WHERE)
def test_skipping_without_clipping(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = trained(
        tmp_path / "hand", settings={"max_grad_norm": 0.0, "on_nonfinite": "ignore"}, callbacks=[LeavesOut(BAD_STEP)]
    )
    if where == "device":
        decide_on_the_device(monkeypatch)
    guarded = trained(tmp_path / "guarded", poison=poison_of(BAD_STEP), settings={"max_grad_norm": 0.0})
    assert doubles.same(doubles.weights(guarded), doubles.weights(hand))


def test_gradients_that_are_offloaded_are_decided_about_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = trained(tmp_path / "hand", settings={"on_nonfinite": "ignore"}, callbacks=[LeavesOut(BAD_STEP)])
    decide_on_the_device(monkeypatch, offloads=True)
    guarded = trained(tmp_path / "guarded", poison=poison_of(BAD_STEP))
    assert doubles.same(doubles.weights(guarded), doubles.weights(hand))


@pytest.mark.parametrize("where", WHERE)
def test_stop_raises_before_the_update(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "device":
        decide_on_the_device(monkeypatch)
    one = trainer(tmp_path / "one", poison=poison_of(BAD_STEP), settings={"on_nonfinite": "stop"})
    with pytest.raises(NonFiniteError, match=f"Step {BAD_STEP}: loss or gradient is not finite"):
        one.train()
    before = trained(tmp_path / "two", callbacks=[LeavesOut(*range(BAD_STEP, 20))])
    assert doubles.same(doubles.weights(one), doubles.weights(before))


@pytest.mark.parametrize("where", WHERE)
def test_warn_does_what_ignore_does_and_says_so(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison = {1: POISONS["loss-alone"], 5: POISONS["nan"]}
    hears = Hears()
    ignored = trained(tmp_path / "ignored", poison=poison, settings={"on_nonfinite": "ignore"})
    if where == "device":
        decide_on_the_device(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        warned = trained(tmp_path / "warned", poison=poison, settings={"on_nonfinite": "warn"}, callbacks=[hears])
    ours = doubles.weights(warned)
    theirs = doubles.weights(ignored)
    assert all(torch.equal(ours[name].nan_to_num(7.0), theirs[name].nan_to_num(7.0)) for name in ours)
    assert math.isnan(float(ours["head.bias"]))
    assert [i.step for i in hears.incidents] == [1, 3, 4, 5, 6, 7, 8]
    assert "Step 3: loss or gradient is not finite; the update was made." in caplog.text
    assert "More bad steps: 7, 8." in caplog.text


@pytest.mark.parametrize("where", WHERE)
def test_too_many_skipped_steps_in_a_row_end_the_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "device":
        decide_on_the_device(monkeypatch)
    poison = {row: POISONS["nan"] for step in (1, 3, 4, 6, 7, 8) for row in poison_of(step)}
    two = trained(
        tmp_path / "two", poison={r: p for r, p in poison.items() if r < 14}, settings={"max_skipped_steps": 3}
    )
    assert two.state.log_history[0]["guard/skipped_steps"] == 5
    with pytest.raises(NonFiniteError, match="3 steps in a row were skipped"):
        trained(tmp_path / "three", poison=poison, settings={"max_skipped_steps": 3})
    trained(tmp_path / "any", poison=poison, settings={"max_skipped_steps": 0})


@pytest.mark.parametrize("where", WHERE)
def test_a_healthy_run_is_the_same_to_the_bit(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 12, "logging_steps": 5, "weight_decay": 0.1}
    off = trained(tmp_path / "off", settings={**settings, "on_nonfinite": "ignore"})
    if where == "device":
        decide_on_the_device(monkeypatch)
    on = trained(tmp_path / "on", settings=settings)
    assert doubles.same(doubles.weights(on), doubles.weights(off))
    assert same_state(on, off)
    timed = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    logs = [[{k: v for k, v in row.items() if k not in timed} for row in one.state.log_history] for one in (on, off)]
    assert logs[0] == logs[1]


def test_the_schedule_of_a_checkpoint_knows_of_the_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_on_the_device(monkeypatch)
    settings = {"save_strategy": "steps", "save_steps": BAD_STEP, "max_steps": BAD_STEP + 1, "logging_steps": 100}
    trained(tmp_path, poison=poison_of(BAD_STEP), settings=settings)
    saved = torch.load(tmp_path / f"checkpoint-{BAD_STEP}" / "scheduler.pt", weights_only=True)
    assert saved["last_epoch"] == BAD_STEP - 1


def test_a_callback_that_raises_in_on_incident_ends_the_run(tmp_path: Path) -> None:
    class Raises(trainwright.TrainerCallback):
        def on_incident(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyError(kwargs["incident"].step)

    one = trainer(tmp_path, poison=poison_of(BAD_STEP), callbacks=[Raises()])
    with pytest.raises(KeyError):
        one.train()
    assert one.state.global_step == BAD_STEP - 1


def test_the_journal_has_each_incident(tmp_path: Path) -> None:
    trained(tmp_path, poison=poison_of(BAD_STEP), settings={"save_strategy": "steps", "save_steps": 8})
    text = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert f"Step {BAD_STEP}: loss or gradient is not finite; the update was skipped" in text


class RaisesAt(trainwright.TrainerCallback):
    """Ends the run with an error when the guard reports a step; notes how many extensions marked each window."""

    trainer: Any

    def __init__(self, step: int) -> None:
        self.step = step
        self.num_marks: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_marks.append(len(self.trainer._trainwright.run.extensions.mark))

    def on_incident(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs["incident"].step == self.step:
            raise RuntimeError("planned")


@pytest.mark.parametrize(("fails_at", "num_skipped"), [(BAD_STEP, 0), (BAD_STEP + 1, 1)])
def test_windows_are_marked_once_a_step_was_bad(fails_at: int, num_skipped: int, tmp_path: Path) -> None:
    """The counts in the checkpoint that an error leaves are those of the last finished step."""
    raises = RaisesAt(fails_at)
    settings = {"save_on_exception": True, "save_strategy": "steps", "save_steps": 100}
    poison = poison_of(BAD_STEP) | poison_of(BAD_STEP + 1)
    raises.trainer = trainer(tmp_path, poison=poison, settings=settings, callbacks=[raises])
    with pytest.raises(RuntimeError, match="planned"):
        raises.trainer.train()
    others = raises.num_marks[0]
    assert raises.num_marks == [others] * BAD_STEP + [others + 1] * (fails_at - BAD_STEP)
    saved = Checkpoint(tmp_path / f"checkpoint-{fails_at - 1}").entry("guard").state()
    assert saved.get("skipped_steps", 0) == num_skipped


def test_a_first_gradient_is_one_or_nan() -> None:
    mark = step_guard.LossMark()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for value in (0.0, -3.5, 1e30, 1e-30):
            assert mark(torch.tensor(value, dtype=dtype)).tolist() == 1.0
        for value in (math.nan, math.inf, -math.inf):
            assert math.isnan(mark(torch.tensor(value, dtype=dtype)))
    assert mark(torch.ones(2)) is None
    assert mark(3.0) is None  # type: ignore[arg-type]
