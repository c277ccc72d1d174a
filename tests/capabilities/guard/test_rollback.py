"""Rollback: weights of the last snapshot, samples since then left out; a resume goes back to the same step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.capabilities.guard.rollback import MemorySnapshot
from trainwright.errors import NonFiniteError
from trainwright.state.progress import Progress
from trainwright.state.trainer_state import TrainerControl, TrainerState

from ...contract import doubles
from .poisoned import BATCH, POISONS, Hears, LeavesOut, Model, optimizer_of, trained, trainer

BAD_STEP = 7
SETTINGS = {"on_nonfinite": "rollback", "rollback_every": 4, "max_steps": 10, "logging_steps": 10}
NAN_AT_7 = {(BAD_STEP - 1) * BATCH: POISONS["nan"]}


def by_hand(tmp_path: Path, *steps: int, **parts: Any) -> dict[str, torch.Tensor]:
    settings = {"max_steps": 10, "logging_steps": 10}
    one = trained(tmp_path / "hand", settings=settings, callbacks=[LeavesOut(*steps)], **parts)
    return doubles.weights(one)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, (5, 6, 7)),
        ({"rollback_every": 50}, range(1, 8)),
        ({"rollback_skip_samples": 2 * BATCH - 1}, (5, 6, 7, 8, 9)),
        ({"rollback_every": 0, "save_strategy": "steps", "save_steps": 3}, (7,)),
        ({"rollback_every": 0, "save_strategy": "steps", "save_steps": 5}, (6, 7)),
        ({"save_strategy": "steps", "save_steps": 5}, (6, 7)),
    ],
    ids=str,
)
def test_the_samples_since_the_snapshot_are_left_out(settings: dict[str, Any], left_out: Any, tmp_path: Path) -> None:
    hears = Hears()
    one = trained(tmp_path / "one", poison=NAN_AT_7, settings={**SETTINGS, **settings}, callbacks=[hears])
    assert doubles.same(doubles.weights(one), by_hand(tmp_path, *left_out))
    (incident,) = hears.incidents
    assert (incident.kind, incident.step, incident.action) == ("nonfinite", BAD_STEP, "rollback")
    assert f"weights, optimizer and schedule are back at step {min(left_out) - 1}" in incident.text
    logged = one.state.log_history[0]
    assert (logged["guard/rollbacks"], logged.get("guard/skipped_steps", 0)) == (1, max(left_out) - BAD_STEP)
    assert one.state.global_step == 10  # the data moves on


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-fused", "rmsprop"])
def test_states_of_the_optimizer_go_back_too(optimizer: str, tmp_path: Path) -> None:
    models = [doubles.model(Model) for _ in range(2)]
    first, second = ((optimizer_of(model, optimizer), None) for model in models)
    poison = {0: POISONS["nan"]} | NAN_AT_7
    one = trained(tmp_path / "one", poison=poison, settings=SETTINGS, model=models[0], optimizers=first)
    hand = by_hand(tmp_path, 1, 5, 6, 7, model=models[1], optimizers=second)
    assert doubles.same(doubles.weights(one), hand)


def test_a_spike_is_rolled_back(tmp_path: Path) -> None:
    spikes = {"on_spike": "rollback", "spike_warmup": 5, "spike_window": 7, "spike_threshold": 100.0}
    poison = {(BAD_STEP - 1) * BATCH: {"labels": 1e6}}
    one = trained(tmp_path / "one", poison=poison, settings={**SETTINGS, **spikes, "on_nonfinite": "skip"})
    assert doubles.same(doubles.weights(one), by_hand(tmp_path, 5, 6, 7))


@pytest.mark.parametrize("step", [3, 6, 9])
@pytest.mark.parametrize("every", [0, 4])
def test_a_resume_goes_back_to_the_same_step(every: int, step: int, tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        "rollback_every": every,
        "rollback_skip_samples": 3 * BATCH,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = trained(tmp_path, poison=NAN_AT_7, settings=settings)
    weights = doubles.weights(whole)
    assert doubles.same(weights, by_hand(tmp_path, 7, 8, 9, 10))
    resumed = trainer(tmp_path, poison=NAN_AT_7, settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert doubles.same(doubles.weights(resumed), weights)


def test_the_same_snapshot_is_not_gone_back_to_for_ever(tmp_path: Path) -> None:
    poison = dict.fromkeys(range((BAD_STEP - 1) * BATCH, 20, BATCH), POISONS["nan"])
    one = trainer(tmp_path, poison=poison, settings={**SETTINGS, "rollback_every": 50, "save_on_exception": True})
    with pytest.raises(NonFiniteError, match=r"after 3 rollbacks to step 0 \(max_rollbacks=3\)"):
        one.train()
    assert one.state.global_step == 9
    assert not list(tmp_path.glob("checkpoint-*"))  # the weights are not those of step 9


def test_buffers_and_frozen_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    snapshot = MemorySnapshot(model, optimizer, None, every=1)
    run = Progress(TrainerState(), TrainerControl())
    for step in (0, 1):  # without states of the optimizer, then with them
        run.state.global_step = step
        snapshot.keep(run, is_saved=False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        assert snapshot.restore() == step
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert len(optimizer.state) == 0 if step == 0 else len(optimizer.state) == 3
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
