"""Which parameters decay: the same as in transformers, for models and for modules with odd names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names as original

from trainwright import get_parameter_names

from .._support.small import OURS, REFERENCE, data, make_trainer, models


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Odd(nn.Module):
    """Norms by class, by name and by the name of what holds them; names that only look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(2, 2)
        self.q_norm = nn.Linear(2, 2)
        self.normal = nn.Linear(2, 2)
        self.LayerNorm = nn.Linear(2, 2)
        self.my_rmsnorm = RMSNorm()
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm": RMSNorm(), "plain": nn.Linear(2, 2)}), nn.LayerNorm(2)])
        self.batch = nn.BatchNorm1d(2)
        self.bias = nn.Parameter(torch.zeros(2))
        self.debias = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))


MODELS = [models.bert, models.bert_mlm, models.llama, models.t5, models.gpt2, models.ReturnsDict, Odd]


@pytest.mark.framework
@pytest.mark.parametrize("build", MODELS)
def test_the_same_names_decay(build: Any, tmp_path: Path) -> None:
    model = build()
    ours, theirs = (
        make_trainer(tmp_path, side, model=model).get_decay_parameter_names(model) for side in (OURS, REFERENCE)
    )
    assert ours == theirs
    assert 0 < len(ours) < len(list(model.parameters()))


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize(
    ("types", "names"),
    [([], None), ([nn.Linear], None), ([nn.LayerNorm], ["weight"]), ([], [r"^bias$", r"norm"])],
    ids=str,
)
def test_the_same_names_are_found(build: Any, types: list[type], names: list[str] | None) -> None:
    model = build()
    assert get_parameter_names(model, types, names) == original(model, types, names)


@pytest.mark.framework
@pytest.mark.parametrize("build", [models.bert, models.llama, models.bert_with_frozen_encoder, models.ReturnsDict])
def test_the_groups_are_those_of_the_original(build: Any, tmp_path: Path) -> None:
    model = models.seeded(build)
    groups = []
    for side in (OURS, REFERENCE):
        optimizer = make_trainer(tmp_path, side, model=model, weight_decay=0.3).create_optimizer()
        groups.append([(group["weight_decay"], [id(p) for p in group["params"]]) for group in optimizer.param_groups])
    assert groups[0] == groups[1]
    assert [decay for decay, _ in groups[0]] == [0.3, 0.0]
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(i for _, ids in groups[0] for i in ids) == sorted(trained)


def test_an_override_decides_what_decays(tmp_path: Path) -> None:
    from trainwright import Trainer

    class Nothing(Trainer):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return []

    trainer = make_trainer(tmp_path, cls=Nothing, weight_decay=0.3, train_dataset=data.vectors(4))
    trainer.train()
    assert [len(g["params"]) for g in trainer.optimizer.param_groups if g["weight_decay"] == 0.3] == [0]
