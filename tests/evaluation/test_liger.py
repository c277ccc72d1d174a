"""Evaluations of the loss alone have Liger's forward pass compute no logits, as with transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .._support.small import data, make_trainer, models


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """Stands in for the package, whose forward passes take `skip_logits`: what each of them was asked."""
    asked: list[bool | None] = []

    def apply(model: Any, **options: Any) -> None:
        plain = model.forward

        def forward(input_ids: Any = None, labels: Any = None, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            asked.append(skip_logits)
            outputs = plain(input_ids=input_ids, labels=labels, **kwargs)
            if skip_logits:
                outputs["logits"] = None
            return outputs

        model.forward = forward

    package = ModuleType("liger_kernel")
    module = ModuleType("liger_kernel.transformers")
    vars(module)["_apply_liger_kernel_to_instance"] = apply
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def trained(folder: Path, **settings: Any) -> Any:
    trainer = make_trainer(
        folder,
        model=models.seeded(models.llama),
        train_dataset=data.sequences(8),
        eval_dataset=data.sequences(8),
        max_steps=2,
        use_liger_kernel=True,
        **settings,
    )
    trainer.train()
    return trainer


def test_the_loss_alone_needs_no_logits(asked: list[bool | None], tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    assert asked == [None, None]
    asked.clear()
    skipped = trainer.evaluate()["eval_loss"]
    assert asked == [True]
    plain = trainer.predict(data.sequences(8))
    assert asked == [True, None]
    assert plain.metrics["test_loss"] == skipped
    assert plain.predictions.shape[0] == 8


def test_metrics_need_logits(asked: list[bool | None], tmp_path: Path) -> None:
    trainer = trained(tmp_path, compute_metrics=lambda predicted: {"size": float(predicted.predictions.size)})
    assert trainer.evaluate()["eval_size"] > 0
    assert asked == [None, None, None]


def test_a_loss_of_ones_own_needs_logits(asked: list[bool | None], tmp_path: Path) -> None:
    trainer = trained(tmp_path, label_smoothing_factor=0.1)
    assert trainer.evaluate()["eval_loss"] > 0
    assert True not in asked
