"""Muon for hidden matrices and AdamW for the rest: who gets what, one optimizer to the outside, the sum of both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import ArgumentError
from trainwright.optim.own_optimizers import MuonWithAdamW, hidden_matrices, muon_groups

from ..parity import models
from .table import Net, seeded


def test_hidden_matrices_are_neither_embeddings_nor_the_output_layer() -> None:
    assert hidden_matrices(Net()) == {"body.weight"}
    llama = hidden_matrices(models.llama())
    assert "model.layers.0.mlp.up_proj.weight" in llama
    assert not llama & {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    bert = hidden_matrices(models.bert())
    assert "bert.pooler.dense.weight" in bert
    assert not [name for name in bert if "embeddings" in name or "classifier" in name]
    gpt2 = hidden_matrices(models.gpt2())  # its layers are Conv1D, not Linear
    assert "transformer.h.0.mlp.c_fc.weight" in gpt2
    assert not [name for name in gpt2 if "wte" in name or "wpe" in name]


def test_a_model_without_such_matrices_is_refused() -> None:
    with pytest.raises(ArgumentError, match="adamw_torch"):
        muon_groups(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)))
    frozen = Net()
    frozen.body.requires_grad_(False)
    with pytest.raises(ArgumentError, match="optim='muon'"):
        muon_groups(frozen)


def gradients(model: nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g)


def test_it_is_torchs_two_optimizers() -> None:
    ours = seeded(Net)
    theirs = seeded(Net)
    one = MuonWithAdamW(muon_groups(ours), lr=0.01, weight_decay=0.1)
    hidden = hidden_matrices(theirs)
    named = list(theirs.named_parameters())
    two: list[Any] = [
        torch.optim.Muon([p for n, p in named if n in hidden], 0.01, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in named if n not in hidden], 0.01, weight_decay=0.1),
    ]
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        one.step()
        [part.step() for part in two]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_schedule_moves_both() -> None:
    model = seeded(Net)
    optimizer = MuonWithAdamW(muon_groups(model), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        gradients(model, 0)
        optimizer.step()
        schedule.step()
    assert [group["lr"] for part in optimizer._parts for group in part.param_groups] == [0.125, 0.125]


def test_its_state_makes_the_round_trip() -> None:
    def run(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            gradients(model, step)
            optimizer.step()

    whole = seeded(Net)
    parts = seeded(Net)
    uninterrupted = MuonWithAdamW(muon_groups(whole), lr=0.01)
    run(whole, uninterrupted, range(6))
    first = MuonWithAdamW(muon_groups(parts), lr=0.01)
    run(parts, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    assert set(saved) == {"state", "param_groups"}  # torch's form, which other tools read
    second = MuonWithAdamW(muon_groups(parts), lr=0.5)
    second.load_state_dict(saved)
    run(parts, second, range(3, 6))
    for mine, other in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert len(second.state) == len(list(parts.parameters()))


def test_a_closure_is_called_once() -> None:
    model = seeded(Net)
    optimizer = MuonWithAdamW(muon_groups(model), lr=0.01)
    gradients(model, 0)
    assert optimizer.step(lambda: 3.0) == 3.0
