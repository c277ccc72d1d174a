"""Rates of single parameters: by layer, by pattern, both; under a schedule, with any optimizer that has groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainingArguments
from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import layer_factors, own_rates

from ..parity import models
from .table import Net, Row, losses, make_trainer


def rates(model: nn.Module, **settings: Any) -> dict[str, float]:
    return own_rates(model, TrainingArguments("x", use_cpu=True, learning_rate=1.0, **settings))


def test_bert_has_its_embeddings_lowest_and_its_head_at_the_full_rate() -> None:
    """Two layers: layer i has d^(2-i), the embeddings d^3, pooler and classifier 1."""
    found = layer_factors(models.bert(), 0.5)
    assert found["bert.embeddings.word_embeddings.weight"] == 0.125
    assert found["bert.embeddings.LayerNorm.weight"] == 0.125
    assert found["bert.encoder.layer.0.attention.self.query.weight"] == 0.25
    assert found["bert.encoder.layer.1.output.LayerNorm.bias"] == 0.5
    assert found["bert.pooler.dense.weight"] == found["classifier.weight"] == 1.0


def test_llama_counts_its_layers_and_not_its_final_norm() -> None:
    found = layer_factors(models.llama(), 0.5)
    assert found["model.embed_tokens.weight"] == 0.125
    assert found["model.layers.0.mlp.up_proj.weight"] == 0.25
    assert found["model.layers.1.self_attn.q_proj.weight"] == 0.5
    assert found["model.norm.weight"] == 1.0


def test_encoder_and_decoder_are_counted_from_their_own_tops() -> None:
    found = layer_factors(models.t5(), 0.5)
    assert found["shared.weight"] == 0.25
    for stack in ("encoder", "decoder"):
        assert found[f"{stack}.block.0.layer.0.SelfAttention.q.weight"] == 0.5
        assert found[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == 0.5
        assert found[f"{stack}.final_layer_norm.weight"] == 1.0


def test_a_sequential_is_a_stack() -> None:
    found = layer_factors(models.ReturnsDict(), 0.5)
    assert found == {
        "body.0.weight": 0.25,
        "body.0.bias": 0.25,
        "body.1.weight": 0.5,
        "body.1.bias": 0.5,
        "head.weight": 1.0,
        "head.bias": 1.0,
    }


def test_experts_are_inside_of_their_layer() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert set(layer_factors(model, 0.5).values()) == {0.5}


def test_a_model_without_layers_is_told_what_to_use() -> None:
    with pytest.raises(ArgumentError, match="Use lr_groups"):
        layer_factors(Net(), 0.5)


def test_a_pattern_gives_a_rate_or_a_factor_and_the_first_decides() -> None:
    found = rates(models.bert(), lr_groups={"classifier": 3.0, r"layer\.0\..*bias": 0, "encoder": "0.1x", "bias": 7})
    assert found["classifier.weight"] == 3.0
    assert found["bert.encoder.layer.0.output.dense.bias"] == 0.0
    assert found["bert.encoder.layer.0.output.dense.weight"] == 0.1
    assert found["bert.pooler.dense.bias"] == 7.0
    assert found["bert.pooler.dense.weight"] == 1.0


def test_a_factor_is_of_the_rate_that_the_layer_has() -> None:
    found = rates(models.bert(), layerwise_lr_decay=0.5, lr_groups={"query": "x2", "classifier": 5})
    assert found["bert.encoder.layer.0.attention.self.query.weight"] == 0.5
    assert found["bert.encoder.layer.0.attention.self.key.weight"] == 0.25
    assert found["classifier.weight"] == 5.0


def test_a_pattern_that_fits_nothing_is_told_the_nearest_names() -> None:
    with pytest.raises(ArgumentError, match=r"lr_groups: 'clasifier' fits no trainable.*classifier\.weight"):
        rates(models.bert(), lr_groups={"clasifier": 1e-3})
    with pytest.raises(ArgumentError, match="fits no trainable"):
        rates(models.bert_with_frozen_encoder(), lr_groups={r"encoder\.layer": 1e-3})


SETTINGS: dict[str, Any] = {"lr_groups": {"embed": "0.5x", "head": 0.2}, "weight_decay": 0.1}


def groups_by_name(trainer: Any) -> dict[str, tuple[float, float]]:
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    return {names[id(p)]: (g["initial_lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("adamw_torch", None),
        ("muon", None),
        ("sgd", None),
        ("galore_adamw", "galore_torch"),
        ("galore_adamw_layerwise", "galore_torch"),
        ("adamw_8bit", "bitsandbytes"),
        ("schedule_free_adamw", "schedulefree"),
    ],
)
def test_every_optimizer_with_groups_takes_them(name: str, module: str | None, tmp_path: Path) -> None:
    row = Row(name, module, lr=0.01)
    row.needs()
    targets = {"optim_target_modules": ["body"]} if "galore" in name else {}
    trainer = make_trainer(tmp_path, row, max_steps=2, **SETTINGS, **targets)
    trainer.train()
    assert groups_by_name(trainer) == {
        "embed.weight": (0.005, 0.1),
        "body.weight": (0.01, 0.1),
        "head.weight": (0.2, 0.1),
        "body.bias": (0.01, 0.0),
        "norm.weight": (0.01, 0.0),
        "norm.bias": (0.01, 0.0),
        "head.bias": (0.2, 0.0),
    }


def test_the_schedule_multiplies_each_rate(tmp_path: Path) -> None:
    class Rates:
        seen: list[list[float]] = []  # noqa: RUF012

    from trainwright import TrainerCallback

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Rates.seen.append([group["lr"] for group in kwargs["optimizer"].param_groups])

    trainer = make_trainer(tmp_path, Row("sgd", lr=0.1), max_steps=4, callbacks=[Watch], lr_groups={"head": 0.4})
    trainer.train()
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.4, 0.1, 0.4, 0.1]
    for step, seen in enumerate(Rates.seen):
        share = (4 - step) / 4
        assert seen == pytest.approx([0.4 * share, 0.1 * share, 0.4 * share, 0.1 * share])


def test_a_rate_of_zero_holds_a_part_still(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Row("adamw_torch"), max_steps=3, lr_groups={"embed": 0})
    before = trainer.model.embed.weight.detach().clone(), trainer.model.body.weight.detach().clone()
    trainer.train()
    assert torch.equal(trainer.model.embed.weight, before[0])
    assert not torch.equal(trainer.model.body.weight, before[1])


def test_it_equals_an_optimizer_with_such_groups(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, Row("sgd", lr=0.1), max_steps=4, lr_groups={"head": 0.4, "embed": "0.5x"})
    ours.train()
    theirs = make_trainer(tmp_path, Row("sgd", lr=0.1), max_steps=4)
    rate = {"head": 0.4, "embed": 0.05}
    groups = [
        {"params": [p], "lr": rate.get(name.partition(".")[0], 0.1)} for name, p in theirs.model.named_parameters()
    ]
    theirs.optimizer = torch.optim.SGD(groups, lr=0.1)
    theirs.train()
    assert losses(ours) == losses(theirs)


def test_what_has_no_groups_refuses_them(tmp_path: Path) -> None:
    pytest.importorskip("lomo_optim")
    with pytest.raises(ArgumentError, match="takes the whole model"):
        make_trainer(tmp_path, Row("lomo"), lr_groups={"head": 0.1}).train()


def test_none_of_it_leaves_the_two_groups_as_they_were(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Row("adamw_torch"), max_steps=1, layerwise_lr_decay=1)
    trainer.train()
    assert len(trainer.optimizer.param_groups) == 2
