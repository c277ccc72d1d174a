"""One device, through a trainer: what a skipped step holds, and when parameters are looked at again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback

from .._support.small import data, differing, make_trainer, models


class Overflows(Trainer):
    """One step's loss is too large for fp16 gradients."""

    at = 2

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1e30 if self.state.global_step == self.at else loss


class Watches(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
        self.weights.append({n: p.detach().clone() for n, p in kwargs["model"].named_parameters()})


def test_a_skipped_step_holds_weights_and_schedule(tmp_path: Path) -> None:
    watches = Watches()
    trainer = make_trainer(
        tmp_path, cls=Overflows, fp16=True, callbacks=[watches], num_train_epochs=1, learning_rate=1e-3
    )
    trainer.train()
    assert trainer.state.global_step == 7
    assert differing(watches.weights[2], watches.weights[1]) == {}
    assert watches.rates[2] == watches.rates[1]
    assert len({*watches.rates}) == 6, "every other step moves the schedule"
    for before, after in ((0, 1), (2, 3), (3, 4)):
        assert differing(watches.weights[after], watches.weights[before])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_mixed_precision(precision: str, tmp_path: Path) -> None:
    plain = make_trainer(tmp_path, model=models.bert(), train_dataset=data.texts(26))
    plain.train()
    mixed = make_trainer(tmp_path, model=models.bert(), train_dataset=data.texts(26), **{precision: True})
    mixed.train()
    ours, theirs = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (mixed, plain))
    assert ours == pytest.approx(theirs, rel=0.1)
    assert ours != theirs
    assert all(p.dtype == torch.float32 for p in mixed.model.parameters())
    assert not torch.is_autocast_enabled("cpu")


class Unfreezes(TrainerCallback):
    """The way that gradual unfreezing is written."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            for parameter in kwargs["model"].bert.encoder.parameters():
                parameter.requires_grad_(True)


def test_what_is_unfrozen_at_an_epoch_is_clipped_and_cleared(tmp_path: Path) -> None:
    """Its gradients count in the norm; a norm that left them out would be smaller."""
    model = models.seeded(models.bert_with_frozen_encoder)
    norms: dict[int, float] = {}

    class Measures(Unfreezes):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
            norms[state.global_step + 1] = torch.nn.utils.get_total_norm(gradients).item()

    trainer = make_trainer(tmp_path, model=model, train_dataset=data.texts(26), callbacks=[Measures], max_grad_norm=1e9)
    trainer.train()
    logged = {e["step"]: e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e}
    assert logged == pytest.approx(norms)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("limit", [0.05, 0.0, None])
def test_the_limit_is_obeyed_and_the_norm_before_it_is_logged(limit: Any, tmp_path: Path) -> None:
    after: list[float] = []

    class Measures(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after.append(torch.nn.utils.get_total_norm([p.grad for p in kwargs["model"].parameters()]).item())

    trainer = make_trainer(tmp_path, callbacks=[Measures], max_grad_norm=limit)
    trainer.train()
    logged = [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]
    if limit:
        assert max(after) <= limit * 1.001
        assert min(logged) > limit
    else:
        assert logged == pytest.approx(after)


def test_two_trainers_keep_their_precisions(tmp_path: Path) -> None:
    seen: dict[str, set[torch.dtype]] = {"first": set(), "second": set()}
    trainers = {"first": make_trainer(tmp_path, bf16=True), "second": make_trainer(tmp_path)}
    for name, trainer in trainers.items():
        trainer.model.body[0].register_forward_hook(lambda m, i, out, name=name: seen[name].add(out.dtype))
    for trainer in trainers.values():
        trainer.train()
    assert seen == {"first": {torch.bfloat16}, "second": {torch.float32}}
    assert trainers["second"].accelerator.mixed_precision == "no"


class Partly(torch.nn.Module):
    """A parameter that is frozen within a window, one that is always frozen, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(data.FEATURES, 1)
        self.sometimes = torch.nn.Parameter(torch.ones(3))
        self.never = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.idle = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean() + 100 * self.sometimes.sum()}


class Freezes(TrainerCallback):
    """Freezes a parameter that has a gradient, and gives gradients to the idle and the frozen one after the update."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].sometimes.requires_grad_(state.global_step != 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].idle.sum().backward()
        kwargs["model"].never.grad = torch.ones(3)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert [name for name, p in kwargs["model"].named_parameters() if p.grad is not None] == []


def test_frozen_parameters_are_not_clipped_and_all_gradients_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped: list[list[tuple[int, ...]]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noting(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        norm = clip(parameters, *args, **kwargs)
        clipped.append([tuple(p.shape) for p in parameters])
        assert norm > 50, "the gradient of a parameter that is frozen by now counts"
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noting)
    trainer = make_trainer(tmp_path, model=Partly(), callbacks=[Freezes()], max_steps=3, gradient_accumulation_steps=2)
    trainer.train()
    assert clipped == [[(3,), (3,), (1, data.FEATURES), (1,)]] * 3
