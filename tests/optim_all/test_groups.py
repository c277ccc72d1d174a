"""Which parameters decay: all but biases and norms, as transformers has it; and ways around the groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from trainwright import Trainer, TrainingArguments
from trainwright.optim.parameter_groups import decay_groups, with_decay

from ..parity import models
from .table import Net, Row, make_trainer, seeded


class Scale(nn.Module):
    """A norm that nobody knows but by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.zeros(4))


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True),
    "LlamaRMSNorm": lambda: LlamaRMSNorm(4),
    "T5LayerNorm": lambda: T5LayerNorm(4),
    "own": Scale,
}
NAMES = (
    "norm",
    "layer_norm",
    "input_layernorm",
    "LayerNorm",
    "RMSNorm",
    "ln_1",
    "normalize",
    "q_norm",
    "final",
    "Norm",
)


def tree(norm: Any, name: str) -> nn.Module:
    block = nn.ModuleDict({name: norm(), "proj": nn.Linear(4, 4), "bias_free": nn.Linear(4, 4, bias=False)})
    return nn.ModuleDict({"blocks": nn.ModuleList([block]), name: norm(), "inner": nn.ModuleDict({name: norm()})})


def decaying(trainer: Any, arguments: Any, model: nn.Module) -> list[str]:
    made = trainer(model=nn.Linear(1, 1), args=arguments("x", use_cpu=True, report_to="none"))
    return list(made.get_decay_parameter_names(model))


@pytest.mark.framework
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_transformers(norm: str, name: str) -> None:
    model = tree(NORMS[norm], name)
    theirs = decaying(transformers.Trainer, transformers.TrainingArguments, model)
    assert decaying(Trainer, TrainingArguments, model) == theirs


@pytest.mark.framework
@pytest.mark.parametrize("build", [models.bert, models.llama, models.t5, models.gpt2, models.ReturnsDict])
def test_whole_models_too(build: Any) -> None:
    model = build()
    theirs = decaying(transformers.Trainer, transformers.TrainingArguments, model)
    assert decaying(Trainer, TrainingArguments, model) == theirs
    assert 0 < len(theirs) < len(list(model.parameters()))


def sizes(groups: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(len(group["params"]), group["weight_decay"]) for group in groups]


def test_frozen_parameters_are_in_no_group() -> None:
    model = Net()
    model.body.requires_grad_(False)
    groups = decay_groups(model, {"embed.weight", "body.weight", "head.weight"}, 0.1)
    assert sizes(groups) == [(2, 0.1), (3, 0.0)]


def test_groups_made_for_an_optimizer_are_split_and_keep_what_they_say() -> None:
    model = Net()
    groups = [{"params": list(model.parameters()), "rank": 4}, {"params": [model.body.weight], "weight_decay": 0.5}]
    decays = {"embed.weight", "body.weight", "head.weight"}
    split = with_decay(groups, model, decays, 0.1)
    assert sizes(split) == [(3, 0.1), (4, 0.0), (1, 0.5)]
    assert [group.get("rank") for group in split] == [4, 4, None]
    assert sizes(with_decay(groups, model, decays, 0.0)) == [(7, 0.0), (1, 0.5)]


class Factory:
    """Makes an optimizer of a whole model."""

    def __call__(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.body.weight], lr=lr)  # type: ignore[union-attr]


def test_a_factory_is_called_with_the_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Row("sgd"), max_steps=1, optimizer_cls_and_kwargs=(Factory, {"lr": 0.5}))
    trainer.train()
    assert trainer.optimizer.param_groups[0]["params"] == [trainer.model.body.weight]
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.5


def test_groups_that_a_user_brings_stay_as_they_are(tmp_path: Path) -> None:
    model = seeded(Net)
    kwargs = {"lr": 0.5, "params": [{"params": list(model.parameters()), "momentum": 0.3}]}
    args = TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.1)
    trainer = Trainer(model, args, optimizer_cls_and_kwargs=(torch.optim.SGD, kwargs))
    group = trainer.create_optimizer().param_groups[0]
    assert (group["momentum"], group["weight_decay"], len(group["params"])) == (0.3, 0, 7)
    assert "params" in kwargs  # what a user passed is not used up


def test_both_may_be_given(tmp_path: Path) -> None:
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = Trainer(model, args, optimizers=(optimizer, schedule))
    assert trainer.create_optimizer() is optimizer
    assert trainer.create_scheduler(10) is schedule


class Worded(Net):
    """Enough words for states of 8 bits, if it were not an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)


def test_embeddings_keep_states_of_32_bits_and_later_optimizers_are_not_touched(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # transformers' trainer leaves its embeddings there, in whichever test it ran
    trainer = make_trainer(tmp_path, Row("adamw_8bit"), net=Worded, max_steps=1)
    trainer.train()
    states = {name: trainer.optimizer.state[p]["state1"].dtype for name, p in trainer.model.named_parameters()}
    assert (states["embed.weight"], states["body.weight"]) == (torch.float32, torch.uint8)
    assert (manager.module_weight_config_triple, manager.index2config) == ([], {})
