"""The loss of a causal language model without its logits: as with them, or the plain loss and a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM

from trainwright.distributed import device
from trainwright.errors import MissingPackageError
from trainwright.support import loss_kernels
from trainwright.support.loss_kernels import chunked_cross_entropy

from .._support.small import data, differing, make_trainer, models, weights
from .._support.subprocesses import run_python


def plain(hidden: Any, weight: Any, bias: Any, targets: Any, cap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    logits = functional.linear(hidden, weight, bias).float()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return losses.sum(), losses.detach()


@settings(max_examples=30)
@given(
    num_tokens=st.integers(1, 40),
    words=st.integers(2, 60),
    rows=st.integers(1, 50),
    has_bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    ignored=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    frozen=st.sampled_from([None, 0, 1]),
)
def test_loss_and_gradients_are_those_of_the_logits(
    num_tokens: int, words: int, rows: int, has_bias: bool, cap: float | None, ignored: int, dtype: Any, frozen: Any
) -> None:
    draw = torch.Generator().manual_seed(num_tokens * words)
    parts = [
        torch.randn(num_tokens, 6, generator=draw, dtype=dtype),
        torch.randn(words, 6, generator=draw, dtype=dtype),
    ]
    parts += [torch.randn(words, generator=draw, dtype=dtype)] if has_bias else []
    targets = torch.randint(0, words, (num_tokens,), generator=draw)
    targets[:ignored] = -100
    found = []
    for compute in (plain, chunked_cross_entropy):
        own = [one.clone().requires_grad_(i != frozen) for i, one in enumerate(parts)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_kernels, "ELEMENTS", rows * words)
            loss, losses = compute(*own[:2], own[2] if has_bias else None, targets, cap)
        (loss * 0.5).backward()
        found.append([loss.detach(), losses, *(one.grad for one in own if one.requires_grad)])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours.to(dtype), theirs.to(dtype), rtol=1e-5, atol=1e-5)


def test_a_second_backward_is_refused() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    loss, _ = chunked_cross_entropy(hidden, torch.randn(5, 4), None, torch.tensor([0, 1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def gemma() -> Any:
    """Tied weights, a soft cap of the logits."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    config = Gemma2Config(
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        final_logit_softcapping=3.0,
        pad_token_id=0,
        attn_implementation="eager",
        **sizes,
    )
    return Gemma2ForCausalLM(config)


def trained(folder: Path, build: Any, **settings: Any) -> Any:
    trainer = make_trainer(
        folder,
        model=models.seeded(build),
        train_dataset=masked(8),
        eval_dataset=masked(4),
        max_steps=4,
        optim="sgd",
        **settings,
    )
    trainer.train()
    trainer.losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return trainer


def masked(count: int) -> list[dict[str, Any]]:
    """Sequences whose first labels do not count, differently many in each; of some the very first one does."""
    return [
        {**item, "labels": torch.tensor([-100] * (i % 3) + list(item["input_ids"])[i % 3 :])}
        for i, item in enumerate(data.sequences(count))
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("build", [models.llama, models.gpt2, gemma])
def test_a_run_learns_the_same(build: Any, accumulation: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rest = {
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    with caplog.at_level(logging.INFO, logger="trainwright"):
        ours = trained(tmp_path / "ours", build, loss_kernel="chunked", log_level="info", **rest)
    assert "without logits" in caplog.text
    theirs = trained(tmp_path / "theirs", build, **rest)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for name, weight in weights(theirs.model).items():
        torch.testing.assert_close(weights(ours.model)[name], weight, rtol=1e-4, atol=1e-5)
    assert "forward" not in ours.model.get_output_embeddings().__dict__, "afterwards the model is as it was"
    assert not ours.model._forward_pre_hooks
    assert getattr(ours.model.config, "final_logit_softcapping", None) in (None, 3.0)


def test_only_tokens_with_a_label_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counts(hidden: Any, weight: Any, bias: Any, targets: Any, cap: Any) -> Any:
        seen.append(len(hidden))
        assert (targets >= 0).all()
        return chunked_cross_entropy(hidden, weight, bias, targets, cap)

    items = [{**item, "labels": [-100] * 7 + item["input_ids"][7:]} for item in data.sequences(8)]
    items[0]["labels"] = [-100] * 9
    runs = {}
    for kernel in (None, "chunked"):
        monkeypatch.setitem(loss_kernels.KERNELS, "chunked", counts)
        parts = {"train_dataset": items, "loss_kernel": kernel, "max_steps": 2, "per_device_train_batch_size": 4}
        trainer = make_trainer(
            tmp_path, model=models.seeded(models.llama), train_sampling_strategy="sequential", **parts
        )
        seen.clear()
        trainer.train()
        runs[kernel] = weights(trainer.model)
    assert seen[-2:] == [2 * 3, 2 * 4]
    for plain_weight, weight in zip(runs[None].values(), runs["chunked"].values(), strict=True):
        assert torch.allclose(plain_weight, weight, rtol=1e-4, atol=1e-6)


def test_logits_are_never_made_in_training(tmp_path: Path) -> None:
    model = models.seeded(models.llama)
    shapes = []
    model.register_forward_hook(lambda module, args, output: shapes.append((module.training, output.get("logits"))))
    model.register_forward_hook(lambda module, args, output: type(output)(**output))  # as DDP makes it anew
    make_trainer(
        tmp_path,
        model=model,
        train_dataset=data.sequences(8),
        eval_dataset=data.sequences(4),
        max_steps=2,
        loss_kernel="chunked",
        eval_strategy="steps",
        eval_steps=1,
    ).train()
    assert {logits is None for is_training, logits in shapes if is_training} == {True}
    assert any(logits is not None for is_training, logits in shapes if not is_training), "evaluation may want them"


class OwnLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def own_loss(outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def mixed_up() -> Any:
    """Its logits are not those of its output layer alone."""
    model = models.llama()
    model.lm_head.register_forward_hook(lambda module, args, output: output.tanh())
    return model


@pytest.mark.parametrize(
    ("build", "settings", "reason"),
    [
        (OwnLoss, {}, "its output layer is missing"),
        (mixed_up, {}, "its loss differs from the plain one by"),
        (models.llama, {"label_smoothing_factor": 0.1}, "training looks at the logits"),
        (models.llama, {"compute_loss_func": own_loss}, "training looks at the logits"),
    ],
    ids=["no head", "mixed up", "smoothing", "own loss"],
)
def test_where_it_cannot_be_used_the_plain_loss_is(
    build: Any, settings: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_steps": 2, "train_dataset": masked(8), **settings}
    found = []
    for kernel in ("chunked", None):
        trainer = make_trainer(tmp_path, model=models.seeded(build), loss_kernel=kernel, **settings)
        with caplog.at_level(logging.WARNING, logger="trainwright"):
            trainer.train()
        found.append(weights(trainer.model))
    assert reason in caplog.text
    assert differing(*found) == {}


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels.importlib.util, "find_spec", lambda name: None)
    trainer = make_trainer(tmp_path, model=models.llama(), train_dataset=data.sequences(4), loss_kernel="cce")
    with pytest.raises(MissingPackageError, match="pip install cut-cross-entropy"):
        trainer.train()


@pytest.mark.parametrize(
    ("kind", "has", "chosen"), [("cpu", True, "chunked"), ("cuda", True, "cce"), ("cuda", False, "chunked")]
)
def test_auto_takes_what_the_device_has(kind: str, has: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels.importlib.util, "find_spec", lambda name: object() if has else None)
    assert loss_kernels.choose("auto", runs_triton=device.get_kind(kind).runs_triton) == chosen


MEASURE = """
import resource, sys, time
import torch
from torch.nn import functional
from trainwright.support.loss_kernels import chunked_cross_entropy

torch.manual_seed(0)
hidden = torch.randn(4096, 64, requires_grad=True)
weight = torch.randn(150_000, 64, requires_grad=True)
targets = torch.randint(0, 150_000, (4096,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
if sys.argv[1] == "chunked":
    loss, _ = chunked_cross_entropy(hidden, weight, None, targets)
else:
    loss = functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="sum")
loss.backward()
print(loss.item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - began)
"""


@pytest.mark.process
@pytest.mark.slow  # takes gigabytes
def test_the_memory_of_many_tokens_over_many_words_is_third_at_most() -> None:
    found = {kind: [float(x) for x in run_python("-c", MEASURE, kind).stdout.split()] for kind in ("chunked", "plain")}
    assert found["chunked"][0] == pytest.approx(found["plain"][0], rel=1e-5)
    assert found["chunked"][1] <= 0.35 * found["plain"][1]
