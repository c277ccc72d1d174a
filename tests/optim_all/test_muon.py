"""Muon for hidden matrices and AdamW for the rest: who gets what, one optimizer to the outside, the sum of both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import trainwright
from trainwright.config import resolve
from trainwright.config.plans import FSDPPlan
from trainwright.errors import ArgumentError
from trainwright.optim.factory import optimizer_class_and_kwargs
from trainwright.optim.muon import MatrixMuon
from trainwright.optim.own_optimizers import MuonWithAdamW, find_sections, hidden_matrices, muon_groups, muon_lines

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


# -- stacks of experts, and query, key and value in one matrix ---------------------------------------------------------


def mixture() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        moe_intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3MoeForCausalLM(config)


class Biased(nn.Module):
    """A layer of experts with biases, beside a convolution: both have parameters that look like the others' kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up = nn.Parameter(torch.ones(3, 4, 5))
        self.up_bias = nn.Parameter(torch.ones(3, 5))
        self.conv = nn.Conv1d(4, 4, 3)


def test_experts_are_stacks_and_their_biases_are_none() -> None:
    found = hidden_matrices(mixture())
    assert {name for name in found if "experts" in name} == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    assert hidden_matrices(Biased()) == {"up"}


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_a_stack_is_updated_matrix_by_matrix(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    stack = nn.Parameter(torch.randn(3, *shape, generator=generator))
    each = [nn.Parameter(one.detach().clone()) for one in stack]
    optimizers: list[Any] = [
        MatrixMuon([{"params": [stack]}], 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon(each, 0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator)
        for one, gradient in zip(each, stack.grad, strict=True):
            one.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(each), rtol=0, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_sections_are_updated_as_matrices_of_their_own(axis: int) -> None:
    generator = torch.Generator().manual_seed(2)
    widths = [6, 3, 3]
    joined = nn.Parameter(torch.randn(*((12, 4) if axis == 0 else (4, 12)), generator=generator))
    each = [nn.Parameter(one.detach().clone()) for one in joined.split(widths, dim=axis)]
    optimizers: list[Any] = [
        MatrixMuon([{"params": [joined], "sections": (axis, widths)}], 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon(each, 0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        joined.grad = torch.randn(joined.shape, generator=generator)
        for one, gradient in zip(each, joined.grad.split(widths, dim=axis), strict=True):
            one.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(joined, torch.cat(each, dim=axis), rtol=0, atol=1e-6)


def test_query_key_and_value_are_found_by_the_configuration() -> None:
    gpt2 = models.gpt2()
    width = gpt2.config.hidden_size
    found = find_sections(gpt2)
    assert found["transformer.h.0.attn.c_attn.weight"] == (1, [width] * 3)  # weights (inputs, outputs)
    config = transformers.Phi3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    phi = transformers.Phi3ForCausalLM(config)
    assert find_sections(phi) == {"model.layers.0.self_attn.qkv_proj.weight": (0, [8, 4, 4])}
    groups = muon_groups(phi, split_qkv=True)
    (cut,) = [group for group in groups if "sections" in group]
    assert len(cut["params"]) == 1
    assert sum(len(group["params"]) for group in groups) == len(list(phi.parameters()))


def test_split_qkv_is_an_option_of_the_optimizer() -> None:
    model = models.gpt2()
    args = trainwright.TrainingArguments(use_cpu=True, optim="muon", optim_args="split_qkv=true")
    trainer = trainwright.Trainer(model=model, args=args)
    optimizer = trainer.create_optimizer()
    line, rest = muon_lines(optimizer, model)
    assert line.endswith(f"query, key and value apart in {model.config.n_layer}")
    assert "transformer.wte.weight" in rest


def test_zero_is_refused() -> None:
    args = trainwright.TrainingArguments(use_cpu=True, optim="muon", deepspeed={"zero_optimization": {"stage": 2}})
    with pytest.raises(ArgumentError) as caught:
        optimizer_class_and_kwargs(args, Net())
    words = ["muon", "ZeRO stage 2", "flat", "rows", "fsdp=True", "adamw_torch"]
    assert all(word in str(caught.value) for word in words)


def test_the_older_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "fsdp", lambda args: FSDPPlan(settings={"version": 1}))
    with pytest.raises(ArgumentError, match="Version 1 of FSDP gives each process a flat piece"):
        optimizer_class_and_kwargs(trainwright.TrainingArguments(use_cpu=True, optim="muon"), Net())
