"""Updates that round to nothing: what a log says, and of which optimizers it says nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainingArguments
from trainwright.capabilities.lost_updates.extension import LostUpdates, sample
from trainwright.optim.adamw_bf16 import AdamWBF16
from trainwright.state.trainer_state import TrainerState
from trainwright.support.optimizer_facts import keeps_small_updates

from ..._support.small import StopAt
from ...optim_all.table import Net, Row, make_trainer


def shares(trainer: Any) -> list[float]:
    return [log["lost_updates"] for log in trainer.state.log_history if "lost_updates" in log]


def trained(folder: Path, optim: str = "adamw_torch", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    settings = {"lr": 1e-5, **settings}
    row = Row(optim, lr=settings.pop("lr"), settings={"lr_scheduler_type": "constant"})
    trainer = make_trainer(folder, row, net=lambda: Net().to(dtype), **settings)
    trainer.train()
    return trainer


def test_a_small_rate_loses_most_updates_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trained(tmp_path, log_level="warning")
    found = shares(trainer)
    assert len(found) == trainer.state.global_step
    assert min(found) > 0.5
    assert caplog.text.count("this share of the weights did not move") == 1
    assert "optim='adamw_bf16'" in caplog.text


def test_a_large_rate_loses_few(tmp_path: Path) -> None:
    assert max(shares(trained(tmp_path, lr=0.05))) < 0.05


def test_the_share_is_that_of_all_weights_counted_by_hand(tmp_path: Path) -> None:
    """The parameters are smaller than a sample, so it has all of them."""
    trainer = make_trainer(tmp_path, Row("sgd", lr=1e-3), net=lambda: Net().bfloat16(), max_steps=1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    for name, p in trainer.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda one, name=name: gradients.update({name: one.grad.clone()}))
    trainer.train()
    has_gradient = torch.cat([(gradients[name] != 0).flatten() for name in before])
    is_same = torch.cat([(p.detach() == before[name]).flatten() for name, p in trainer.model.named_parameters()])
    seen = [p for p in before.values() if p.numel() <= 2048]
    assert len(seen) == len(before) - 1  # the matrix of 4,096 weights is sampled
    expected = (has_gradient & is_same).sum() / has_gradient.sum()
    assert shares(trainer) == [pytest.approx(expected.item(), abs=0.05)]


@pytest.mark.parametrize(
    ("optim", "dtype"),
    [("adamw_torch", torch.float32), ("adamw_bf16", torch.bfloat16), ("adamw_bf16 by chance", torch.bfloat16)],
)
def test_where_no_update_is_lost_nothing_is_logged(optim: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, _, chance = optim.partition(" ")
    settings = {"optim_args": "rounding=stochastic"} if chance else {}
    assert shares(trained(tmp_path, name, dtype, max_steps=2, **settings)) == []


def test_a_rate_of_zero_is_not_a_lost_update(tmp_path: Path) -> None:
    row = Row("adamw_torch", lr=1e-5, settings={"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1})
    trainer = make_trainer(tmp_path, row, net=lambda: Net().bfloat16(), max_steps=2)
    trainer.train()
    assert len(shares(trainer)) == 1


def test_with_logs_by_epoch_each_tenth_step_counts_also_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"logging_strategy": "epoch", "num_train_epochs": 2, "per_device_train_batch_size": 2}
    whole = trained(tmp_path / "whole", **settings)
    stopped = make_trainer(
        tmp_path / "parts",
        Row("adamw_torch", lr=1e-5, settings={"lr_scheduler_type": "constant"}),
        net=lambda: Net().bfloat16(),
        callbacks=[StopAt(11)],
        **settings,
    )
    stopped.train()
    resumed = make_trainer(
        tmp_path / "parts",
        Row("adamw_torch", lr=1e-5, settings={"lr_scheduler_type": "constant"}),
        net=lambda: Net().bfloat16(),
        **settings,
    )
    resumed.train(resume_from_checkpoint=True)
    assert shares(whole) == shares(resumed) != []


def test_a_large_model_is_sampled_and_sparse_gradients_are_left_out() -> None:
    parameters = [nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16)) for _ in range(100)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    parameters[0].grad = torch.ones_like(parameters[0]).to_sparse()
    found = [*sample(torch.optim.SGD(parameters, lr=0.1))]
    assert 20 <= len(found) <= 32
    assert all(1000 < len(one.values) <= 2048 for one in found)


@pytest.mark.parametrize("counts", [None, "x", [1], [-1, 2], [2**70, 1], [1.5, 2], {}])
def test_a_strangers_state_begins_at_zero(counts: Any, tmp_path: Path) -> None:
    meter = LostUpdates(TrainingArguments(tmp_path, use_cpu=True))
    meter.load_state_dict({"counts": counts})
    assert meter.log() == {}


class Facts:
    """What an extension reads of a run and of a step: the first one, of weights that no update moves."""

    def __init__(self) -> None:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        self.optimizer = torch.optim.SGD([weight], lr=1e-9)
        self.step = 1
        self.progress = SimpleNamespace(state=TrainerState(global_step=1, logging_steps=1))


def test_a_step_that_is_refused_late_does_not_count(tmp_path: Path) -> None:
    """On a GPU the run learns of it after the step, from the optimizer's flag; its weights have not moved."""
    meter = LostUpdates(TrainingArguments(tmp_path, use_cpu=True))
    facts: Any = Facts()
    shares = []
    for is_refused in (False, True):
        meter.begin(facts)
        meter.decide(facts)
        meter.after_step(facts)
        if is_refused:
            meter.refused(1)
        shares.append(meter.log())
    assert shares == [{"lost_updates": 1.0}, {}]


@pytest.mark.parametrize(
    ("make", "keeps"),
    [
        (torch.optim.AdamW, False),
        (AdamWBF16, True),
        (partial(AdamWBF16, rounding="stochastic"), True),
        ("optimi.AdamW", True),
        (("optimi.AdamW", {"kahan_sum": False}), False),
        ("torchao.optim.AdamW8bit", False),
        (("torchao.optim.AdamW8bit", {"bf16_stochastic_round": True}), True),
    ],
    ids=["torch", "ours", "ours by chance", "optimi", "optimi without", "torchao", "torchao by chance"],
)
def test_optimizers_that_keep_small_updates_are_known(make: Any, keeps: bool) -> None:
    path, settings = make if isinstance(make, tuple) else (make, {})
    if isinstance(path, str):
        module, _, name = path.rpartition(".")
        make = partial(getattr(pytest.importorskip(module), name), **settings)
    assert keeps_small_updates(make([nn.Parameter(torch.ones(2))], lr=1e-3)) is keeps
