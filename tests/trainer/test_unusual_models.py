"""Models with lazy modules, sparse gradients and state that is no tensor; and a best model that an override saves."""

from __future__ import annotations

import io
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from trainwright import Trainer
from trainwright.errors import ModelError

from .._support.small import StopAt, data, differing, logged, make_trainer, weights
from ..parity import models

pytestmark = [
    # torch's own, at the first sparse tensor of a process, and transformers' own, when peft asks it
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


class Lazy(nn.Module):
    """Its input size is found in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.body = nn.LazyLinear(5)
        self.head = nn.LazyLinear(models.CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.body(self.drop(x)))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


class Sparse(nn.Module):
    """Looks two rows up, the same one twice in some samples."""

    def __init__(self, *, is_sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=is_sparse)
        self.head = nn.Linear(4, models.CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.table(x).mean(1))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


def lookups() -> list[dict[str, Any]]:
    return [{"x": torch.tensor([i % 9, i * i % 9]), "labels": i % models.CLASSES} for i in range(26)]


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_lazy_modules_are_trained_and_resumed(save_strategy: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": save_strategy, "save_steps": 5}
    whole = make_trainer(tmp_path / "whole", model=models.seeded(Lazy), **settings)
    whole.train()
    rates = logged(whole, "loss")
    assert rates[-1] < rates[0]
    make_trainer(tmp_path / "cut", model=models.seeded(Lazy), callbacks=[StopAt(9)], **settings).train()
    again = make_trainer(tmp_path / "cut", model=models.seeded(Lazy), **settings)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optim", ["sgd", "adagrad"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 100.0])
def test_sparse_gradients_train_as_dense_ones(
    max_grad_norm: float, optim: str, micro_batches: int, tmp_path: Path
) -> None:
    def trained(is_sparse: bool) -> Any:
        model = models.seeded(lambda: Sparse(is_sparse=is_sparse))
        settings = {"optim": optim, "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": micro_batches}
        folder = tmp_path / str(is_sparse)
        trainer = make_trainer(folder, model=model, train_dataset=lookups(), weight_decay=0.0, **settings)
        trainer.train()
        return trainer

    one = trained(True)
    other = trained(False)
    assert logged(one, "grad_norm") == pytest.approx(logged(other, "grad_norm"), rel=1e-4)
    for name, value in weights(one.model).items():
        torch.testing.assert_close(value, weights(other.model)[name])


def test_an_optimizer_that_takes_no_sparse_gradients_is_named_before_step_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, model=Sparse(), train_dataset=lookups(), log_level="warning")
    with pytest.raises(RuntimeError, match="sparse"):
        trainer.train()
    assert "table has sparse gradients (sparse=True), which AdamW does not take" in caplog.text


class Counts(nn.Module):
    """Counts samples; its state is a dict, or what `kind` makes of it."""

    def __init__(self, kind: Any = dict) -> None:
        super().__init__()
        self.kind = kind
        self.seen = 0
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
            self.history.append(len(x))
        return x

    def get_extra_state(self) -> Any:
        state = {"seen": self.seen, "history": self.history, "text": "a", "mean": torch.tensor(float(self.seen))}
        return self.kind(state)

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]
        self.history = [*state["history"]]
        assert float(state["mean"]) == self.seen


class Plain(nn.Module):
    def __init__(self, kind: Any = dict) -> None:
        super().__init__()
        self.count = Counts(kind)
        self.head = nn.Linear(data.FEATURES, models.CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.count(x))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


class Bert(BertForSequenceClassification):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.count = Counts()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(self.count(input_ids), labels=labels)


def bert() -> Any:
    config = BertConfig(
        vocab_size=models.VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return Bert(config)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(bert(), LoraConfig(target_modules=["query"], r=2))


def counter(model: Any) -> Counts:
    return next(module for module in model.modules() if isinstance(module, Counts))


EXTRA: dict[str, Any] = {
    "plain": Plain,
    "model of transformers": bert,
    "adapter": adapted,
}


@pytest.mark.parametrize("save_async", [True, False], ids=["behind", "blocking"])
@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("kind", EXTRA)
def test_state_that_is_no_tensor_is_restored(kind: str, as_safetensors: bool, save_async: bool, tmp_path: Path) -> None:
    tokens = [{"input_ids": torch.arange(5) + i % 3, "labels": i % 2} for i in range(26)]
    rows = data.vectors(26) if kind == "plain" else tokens

    def trainer(name: str, *callbacks: Any) -> Any:
        settings = {"save_safetensors": as_safetensors, "save_async": save_async}
        model = models.seeded(EXTRA[kind])
        return make_trainer(tmp_path / name, model=model, train_dataset=rows, callbacks=[*callbacks], **settings)

    whole = trainer("whole")
    whole.train()
    trainer("cut", StopAt(3)).train()
    again = trainer("cut")
    again.train(resume_from_checkpoint=True)
    assert counter(again.model).seen == counter(whole.model).seen == 52
    assert counter(again.model).history == counter(whole.model).history
    again.save_model()
    assert (tmp_path / "cut" / "extra_state.pt").is_file()


def test_the_best_model_has_its_own(tmp_path: Path) -> None:
    rows = data.vectors(26)
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "first", "greater_is_better": True}
    values = iter([1.0, 0.0])
    trainer = make_trainer(
        tmp_path, model=Plain(), train_dataset=rows, eval_dataset=rows[:4], **settings, preflight=False
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: {**evaluate(*args, **kwargs), "eval_first": next(values)}
    trainer.train()
    assert counter(trainer.model).seen == 26


@pytest.mark.parametrize("kind", [lambda state: io.BytesIO(), lambda state: deque([1])], ids=["bytes", "deque"])
def test_one_that_cannot_be_saved_is_refused_before_step_1(kind: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=Plain(kind), save_strategy="epoch")
    with pytest.raises(ModelError, match=r"get_extra_state\(\) of count is a (BytesIO|deque)"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert make_trainer(tmp_path, model=Plain(kind), save_strategy="no").train().global_step == 14


class SavesModelAlone(Trainer):
    where = "checkpoint-{}"
    names_it = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / self.where.format(self.state.global_step)
        self.save_model(str(folder))
        if self.names_it and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)


@pytest.mark.parametrize("names_it", [False, True])
@pytest.mark.parametrize("where", ["checkpoint-{}", "elsewhere-{}"])
def test_the_best_model_is_loaded_or_said_to_be_missing(
    where: str, names_it: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cls = type("Own", (SavesModelAlone,), {"where": where, "names_it": names_it})
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, "log_level": "warning"}
    rows = data.vectors(26)
    trainer = make_trainer(tmp_path, cls=cls, train_dataset=rows, eval_dataset=rows, **settings)
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert losses[0] > losses[-1] + 1e-4, "the best weights by this setting are not the last ones"
    is_loaded = names_it or where.startswith("checkpoint")
    expected = losses[0] if is_loaded else losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    assert ("has no weights: an override saves elsewhere" in caplog.text) is not is_loaded
