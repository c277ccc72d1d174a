"""Optimizers that update the weights during the backward pass: layer-wise ones and LOMO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer_pt_utils as reference

from trainwright import LayerWiseDummyOptimizer, LayerWiseDummyScheduler, TrainerCallback
from trainwright.optim.factory import release_lomo_hooks
from trainwright.optim.own_optimizers import step_in_backward

from ..parity.sides import differing, weights
from .table import PROJECTED, Net, Row, losses, make_trainer, seeded


def layers(model: torch.nn.Module, lr: float = 0.1) -> dict[Any, torch.optim.Optimizer]:
    return {p: torch.optim.SGD([p], lr=lr) for p in model.parameters()}


def backward(model: torch.nn.Module) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]


def test_the_stand_in_behaves_as_in_transformers() -> None:
    for kind in (LayerWiseDummyOptimizer, reference.LayerWiseDummyOptimizer):
        alone = kind(lr=0.3)
        assert (alone.step(), alone.zero_grad(), alone.defaults["lr"]) == (None, None, 0.3)
        assert kind().defaults["lr"] == 1e-3
    one = layers(torch.nn.Linear(2, 2, bias=False))
    for schedule in (LayerWiseDummyScheduler, reference.LayerWiseDummyScheduler):
        assert schedule(optimizer_dict=one, lr=0.3).get_lr() == [0.1]


def test_the_schedule_of_stand_ins_shows_all_their_rates() -> None:
    """With torch 2.13 that of transformers cannot be made over more than one."""
    made = LayerWiseDummyScheduler(optimizer_dict=layers(Net()), lr=0.3)
    made.step()
    assert made.get_last_lr() == 7 * [0.1]
    assert LayerWiseDummyScheduler(optimizer_dict={}, lr=0.3).get_last_lr() == [0.3]


def test_each_weight_is_updated_and_its_gradient_freed_at_once() -> None:
    model = seeded(Net)
    before = weights(model)
    optimizer = LayerWiseDummyOptimizer(optimizer_dict=layers(model), lr=0.1)
    step_in_backward(optimizer)
    backward(model)
    assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.2))


def test_a_new_optimizer_takes_the_place_of_the_old_one() -> None:
    model = seeded(Net)
    before = weights(model)
    for lr in (0.4, 0.1):
        step_in_backward(LayerWiseDummyOptimizer(optimizer_dict=layers(model, lr), lr=lr))
    backward(model)
    torch.testing.assert_close(model.body.weight.detach(), before["body.weight"] * (1 - 0.2))


def test_states_of_another_model_are_refused() -> None:
    one = LayerWiseDummyOptimizer(optimizer_dict=layers(Net()))
    other = LayerWiseDummyOptimizer(optimizer_dict=layers(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="2 parameters, and there are 7"):
        one.load_state_dict(other.state_dict())


class Rates(TrainerCallback):
    """What each step was taken at: of the trainer's log, and of the optimizers themselves."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        parts = optimizer.optimizer_dict.values()
        (rate,) = {group["lr"] for part in parts for group in part.param_groups}
        self.seen.append(rate)


@pytest.mark.parametrize("name", ["galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_the_schedule_reaches_every_layer(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name[:6] + "_torch")
    rates = Rates()
    trainer = make_trainer(tmp_path, Row(name, settings=PROJECTED), max_steps=4, callbacks=[rates])
    trainer.train()
    assert rates.seen == pytest.approx([0.01 * k / 4 for k in (4, 3, 2, 1)])
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([0.01 * k / 4 for k in (4, 3, 2, 1)])


def test_layer_by_layer_is_the_same_as_all_at_once(tmp_path: Path) -> None:
    """Without clipping the order of the updates makes no difference."""
    pytest.importorskip("galore_torch")
    settings: dict[str, Any] = {**PROJECTED, "max_grad_norm": 0.0}
    at_once = make_trainer(tmp_path, Row("galore_adamw", settings=settings))
    by_layer = make_trainer(tmp_path, Row("galore_adamw_layerwise", settings=settings))
    at_once.train()
    by_layer.train()
    assert losses(at_once) == losses(by_layer)
    assert differing(weights(by_layer.model), weights(at_once.model)) == {}


def test_lomo_is_plain_gradient_descent(tmp_path: Path) -> None:
    pytest.importorskip("lomo_optim")
    lomo = make_trainer(tmp_path, Row("lomo", lr=0.1))
    sgd = make_trainer(tmp_path, Row("sgd", lr=0.1), max_grad_norm=0.0)
    lomo.train()
    sgd.train()
    assert losses(lomo) == losses(sgd)
    assert differing(weights(lomo.model), weights(sgd.model)) == {}


def test_an_earlier_lomo_lets_go_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("lomo_optim")
    trainer = make_trainer(tmp_path, Row("lomo"), max_steps=1)
    trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    assert {len(p._backward_hooks) for p in trainer.model.parameters()} == {1}
    release_lomo_hooks(trainer.model)
    before = weights(trainer.model)
    backward(trainer.model)
    assert differing(weights(trainer.model), before) == {}


def test_adalomo_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It puts its state on CUDA, which a CPU stands in for here, and leaves it out of its state dict."""
    lomo_optim = pytest.importorskip("lomo_optim")
    from trainwright.optim.factory import adapted

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)

    def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.fused_backward(sum((p - 1).square().sum() for p in model.parameters()), 0.1)
            optimizer.step()

    def make(model: torch.nn.Module) -> Any:
        optimizer = lomo_optim.AdaLomo(model, lr=0.1)
        adapted(optimizer, model)
        return optimizer

    whole = seeded(Net)
    first = seeded(Net)
    second = seeded(Net)
    train(whole, make(whole), 6)
    before = make(first)
    train(first, before, 3)
    second.load_state_dict(first.state_dict())
    after = make(second)
    after.load_state_dict(before.state_dict())
    train(second, after, 3)
    assert differing(weights(second), weights(whole)) == {}
