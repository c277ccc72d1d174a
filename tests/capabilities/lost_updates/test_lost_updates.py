"""Updates that round to nothing: what a log says, and of which optimizers it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainingArguments
from trainwright.capabilities.lost_updates.extension import LostUpdates, sample

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
    assert caplog.text.count("that share of the weights did not move") == 1
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


def test_with_logs_by_epoch_each_tenth_step_counts_and_a_resume_keeps_it(tmp_path: Path) -> None:
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
