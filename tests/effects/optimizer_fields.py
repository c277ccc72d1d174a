"""Checks of the fields about the optimizer, its schedule and the gradients."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from trainwright import LabelSmoother
from trainwright.config import rules

from .bench import Bench, Toy, logged, seeded, weights
from .table import shows


def rates(bench: Bench, **settings: Any) -> list[float]:
    return logged(bench.train(**settings), "learning_rate")


@shows("learning_rate")
def the_rate_is_used_and_logged(bench: Bench) -> None:
    assert rates(bench, learning_rate=0.3)[0] == 0.3
    assert bench.changes_weights({"learning_rate": 0.3})


@shows("lr_scheduler_type")
def the_rate_follows_the_schedule(bench: Bench) -> None:
    assert rates(bench, lr_scheduler_type="constant") == 6 * [0.1]
    assert rates(bench, lr_scheduler_type="linear") == pytest.approx([0.1 * k / 6 for k in range(6, 0, -1)])


@shows("lr_scheduler_kwargs")
def the_schedule_has_these_parameters(bench: Bench) -> None:
    cosine = {"lr_scheduler_type": "cosine_with_min_lr"}
    low = rates(bench, **cosine, lr_scheduler_kwargs={"min_lr": 0.01})
    assert rates(bench, **cosine, lr_scheduler_kwargs='{"min_lr": 0.01}') == low
    assert min(rates(bench, **cosine, lr_scheduler_kwargs={"min_lr": 0.08})) >= 0.08 > min(low)


@shows("warmup_steps")
def the_rate_rises_first(bench: Bench) -> None:
    expected = pytest.approx([0.0, 0.05, 0.1, 0.075, 0.05, 0.025])
    assert rates(bench, warmup_steps=2) == expected
    assert rates(bench, warmup_steps=1 / 3) == expected


@shows("optim")
def the_optimizer_is_the_named_one(bench: Bench) -> None:
    assert type(bench.train(optim="adagrad").optimizer) is torch.optim.Adagrad
    fused = bench.train()
    plain = bench.train(optim="adamw_torch")
    assert type(fused.optimizer) is type(plain.optimizer) is torch.optim.AdamW
    assert (fused.optimizer.defaults["fused"], plain.optimizer.defaults["fused"]) == (True, None)


@shows("optim_args")
def the_optimizer_has_these_parameters(bench: Bench) -> None:
    trainer = bench.train(optim="sgd", optim_args="momentum=0.5, nesterov=true")
    assert (trainer.optimizer.defaults["momentum"], trainer.optimizer.defaults["nesterov"]) == (0.5, True)
    assert bench.changes_weights({"optim_args": "momentum=0.5"}, optim="sgd")


def fake_galore(bench: Bench) -> list[list[dict[str, Any]]]:
    """A stand-in for the package; the parameter groups of each optimizer that was made."""
    made: list[list[dict[str, Any]]] = []

    class GaLoreAdamW(torch.optim.AdamW):
        def __init__(self, groups: Any, **options: Any) -> None:
            made.append(groups)
            super().__init__([{"params": group["params"]} for group in groups], **options)

    package = ModuleType("galore_torch")
    vars(package)["GaLoreAdamW"] = GaLoreAdamW
    bench.monkeypatch.setitem(sys.modules, "galore_torch", package)
    return made


@shows("optim_target_modules")
def these_modules_are_projected(bench: Bench) -> None:
    assert "optim_target_modules has no effect" in rules.advise(bench.args(optim_target_modules=["attn"]))[0]
    made = fake_galore(bench)
    bench.train(optim="galore_adamw", optim_target_modules=["head"])
    (others, projected) = made[0]
    assert [tuple(p.shape) for p in projected["params"]] == [(3, 8)]
    assert "rank" in projected
    assert "rank" not in others
    assert len(others["params"]) == 5


@shows("weight_decay")
def weights_decay_and_biases_do_not(bench: Bench) -> None:
    """Plain gradient descent without a gradient: what is left is the decay."""
    settings: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0, "max_steps": 1, "weight_decay": 0.2}
    before = weights(seeded(Silent))
    after = bench.weights(model=seeded(Silent), **settings)
    for name in before:
        decays = name in ("body.0.weight", "head.weight")
        torch.testing.assert_close(after[name], before[name] * (1 - 0.1 * 0.2 if decays else 1))


class Silent(Toy):
    """Has gradients of zero."""

    def forward(self, x: Any, index: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": 0 * sum(p.sum() for p in self.parameters())}


@shows("adam_beta1")
def the_mean_of_gradients_decays_so(bench: Bench) -> None:
    assert bench.train(adam_beta1=0.5).optimizer.defaults["betas"] == (0.5, 0.999)
    assert bench.changes_weights({"adam_beta1": 0.5})


@shows("adam_beta2")
def the_mean_of_squares_decays_so(bench: Bench) -> None:
    assert bench.train(adam_beta2=0.5).optimizer.defaults["betas"] == (0.9, 0.5)
    assert bench.changes_weights({"adam_beta2": 0.5})


@shows("adam_epsilon")
def the_denominator_has_this_added(bench: Bench) -> None:
    assert bench.train(adam_epsilon=0.1).optimizer.defaults["eps"] == 0.1
    assert bench.changes_weights({"adam_epsilon": 0.1})


@shows("max_grad_norm")
def gradients_are_cut_to_this_norm(bench: Bench) -> None:
    """A step of plain gradient descent is as long as the gradient times the rate."""

    def length_of_a_step(max_grad_norm: float) -> tuple[float, float]:
        trainer = bench.train(optim="sgd", max_steps=1, max_grad_norm=max_grad_norm)
        before = weights(seeded(Toy))
        after = weights(trainer.model)
        length = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm().item()
        return length, logged(trainer, "grad_norm")[0]

    (cut, norm) = length_of_a_step(0.01)
    (whole, same_norm) = length_of_a_step(0)
    assert norm == pytest.approx(same_norm)
    assert norm > 0.01
    assert cut == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert whole == pytest.approx(0.1 * norm, rel=1e-3)


@shows("label_smoothing_factor")
def the_target_is_spread(bench: Bench) -> None:
    trainer = bench.trainer(label_smoothing_factor=0.3)
    model = trainer.model
    rows = trainer.eval_dataset
    output = model(torch.stack([row["x"] for row in rows]))
    expected = LabelSmoother(epsilon=0.3)(output, torch.stack([row["labels"] for row in rows]))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item())
    assert bench.trainer().evaluate()["eval_loss"] != pytest.approx(expected.item())
    assert bench.changes_weights({"label_smoothing_factor": 0.3})
