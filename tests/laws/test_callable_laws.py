"""Whatever stands in the place of a function is called, though nothing can be read of its signature or code."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from trainwright.support.hooks import missing_names
from trainwright.support.model_facts import accepts_loss_kwargs, takes_any_input, takes_argument
from trainwright.support.signatures import read_code, read_parameters, read_signature

from .._support.small import make_trainer, module


class Called:
    """An object that is called, without a name, a code or an owner."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Unreadable(Called):
    """Its signature raises."""

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature")


class Endless(Called):
    """It wraps itself."""

    @property
    def __wrapped__(self) -> Any:
        return self


def mocked(function: Callable[..., Any]) -> Any:
    return mock.Mock(side_effect=function)


KINDS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "object": Called,
    "unreadable": Unreadable,
    "endless": Endless,
    "partial": functools.partial,
    "mock": mocked,
}
TABLE = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.parametrize("value", [*(kind(len) for kind in KINDS.values()), dict, operator.itemgetter(0), max, 3, None])
def test_reading_never_raises(value: Any) -> None:
    signature = read_signature(value)
    assert read_parameters(value) == (None if signature is None else signature.parameters)
    assert read_code(value) is None
    assert takes_argument(value, "unlikely") in (True, False)
    assert missing_names(value) == ()


def test_the_code_inside_of_decorators_is_read() -> None:
    def plain() -> None: ...

    assert read_code(functools.wraps(plain)(lambda: None)) is plain.__code__


def test_an_unreadable_forward_takes_any_input_but_no_count() -> None:
    model = module()
    model.forward = Unreadable(model.forward)
    assert takes_any_input(model)
    assert not accepts_loss_kwargs(model)


def train(folder: Path, **parts: Any) -> dict[str, float]:
    rows = [{"x": torch.full((6,), number / 8), "labels": number % 2} for number in range(8)]
    trainer = make_trainer(folder, train_dataset=rows, eval_dataset=rows, max_steps=2, **parts)
    trainer.train()
    assert trainer.state.global_step == 2
    result: dict[str, float] = trainer.evaluate()
    return result


@TABLE
def test_metrics(kind: Any, tmp_path: Path) -> None:
    found = train(tmp_path, compute_metrics=kind(lambda prediction: {"rows": len(prediction.predictions)}))
    assert found["eval_rows"] == 8


@TABLE
def test_metrics_by_batch(kind: Any, tmp_path: Path) -> None:
    metric = kind(lambda prediction, compute_result: {"last": float(compute_result)})
    assert train(tmp_path, compute_metrics=metric, batch_eval_metrics=True)["eval_last"] == 1.0


@TABLE
def test_collators(kind: Any, tmp_path: Path) -> None:
    train(tmp_path, data_collator=kind(torch.utils.data.default_collate))


@TABLE
def test_model_init(kind: Any, tmp_path: Path) -> None:
    train(tmp_path, model_init=kind(lambda *args, **kwargs: module()))


def test_model_init_with_arguments_that_are_bound(tmp_path: Path) -> None:
    train(tmp_path, model_init=functools.partial(lambda dropout: module(dropout), dropout=0.1))


@TABLE
def test_the_step_of_an_optimizer(kind: Any, tmp_path: Path) -> None:
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []
    step = optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs)

    optimizer.step = kind(counted)  # type: ignore[method-assign]
    train(tmp_path, model=model, optimizers=(optimizer, None))
    assert len(calls) == 2


@TABLE
def test_the_step_of_a_class_of_optimizers(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    step = torch.optim.AdamW.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs) if args else None

    monkeypatch.setattr(torch.optim.AdamW, "step", kind(counted))
    train(tmp_path, optim="adamw_torch")
    assert len(calls) == 2


@TABLE
@pytest.mark.parametrize("name", ["training_step", "compute_loss", "prediction_step", "log", "evaluate"])
def test_hooks_of_a_trainer(name: str, kind: Any, tmp_path: Path) -> None:
    rows = [{"x": torch.full((6,), number / 8), "labels": number % 2} for number in range(8)]
    trainer = make_trainer(tmp_path, train_dataset=rows, eval_dataset=rows, max_steps=2, eval_strategy="epoch")
    calls: list[int] = []
    hook = getattr(trainer, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return hook(*args, **kwargs)

    setattr(trainer, name, kind(counted))
    trainer.train()
    assert calls
