"""Metrics as a person reads them, and as files: in the format of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from trainwright import metrics_format
from trainwright._types import plain_numbers
from trainwright.evaluation.outputs import print_metrics, save_metrics

from .._support.small import OURS, REFERENCE, data, make_trainer

SAMPLES: list[dict[str, Any]] = [
    {},
    {"eval_loss": 0.123456, "epoch": 3.0, "eval_accuracy": 1, "note": "text"},
    {"train_runtime": 0.5, "eval_runtime": 61.239, "test_runtime": 100000.0, "x_runtime": 3599.999},
    {"train_mem_cpu_alloc_delta": 123456789, "train_mem_gpu_peaked_delta": 0, "init_mem_cpu_peaked_delta": -5},
    {"total_flos": 3.2e15, "train_samples_per_second": 12.34567, "tiny": 1e-9, "negative": -0.00005},
    {"bool": True, "none": None, "list": [0.123456], "train_samples": 26},
]


@pytest.mark.framework
@pytest.mark.parametrize("metrics", SAMPLES, ids=range(len(SAMPLES)))
def test_formatted_as_transformers_formats(metrics: dict[str, Any]) -> None:
    assert metrics_format(metrics) == transformers.Trainer.metrics_format(dict(metrics))


@pytest.mark.framework
def test_printed_as_transformers_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for side in (OURS, REFERENCE):
        trainer = make_trainer(tmp_path, side)
        capsys.readouterr()
        trainer.log_metrics("eval", {**SAMPLES[1], **SAMPLES[4]})
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_no_metrics_are_printed_without_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    print_metrics("eval", {})
    assert "eval metrics" in capsys.readouterr().out


@pytest.mark.framework
@pytest.mark.parametrize("combined", [True, False])
def test_saved_as_transformers_saves(combined: bool, tmp_path: Path) -> None:
    for side in (OURS, REFERENCE):
        trainer = make_trainer(tmp_path / side.name, side)
        trainer.save_metrics("train", {"train_loss": 0.5, "epoch": 1.0}, combined=combined)
        trainer.save_metrics("eval", {"eval_loss": 0.25, "epoch": 2.0}, combined=combined)
    ours, theirs = (
        {p.name: json.loads(p.read_text()) for p in (tmp_path / s.name).glob("*.json")} for s in (OURS, REFERENCE)
    )
    assert ours == theirs
    assert ("all_results.json" in ours) == combined


def test_results_of_numpy_can_be_saved(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_dataset=data.vectors(4), compute_metrics=lambda p: {"acc": np.float64(0.5), "n": np.int64(4)}
    )
    save_metrics(tmp_path, "eval", trainer.evaluate())
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_n"] == 4


def test_plain_numbers() -> None:
    value = {
        "a": np.float32(0.5),
        "b": [torch.tensor(3), (np.int64(2),)],
        "c": "x",
        "d": torch.tensor([1, 2]),
        "e": [np.ones(1), np.array(2)],
    }
    plain = plain_numbers(value)
    assert (plain["a"], plain["b"], plain["c"], plain["e"]) == (0.5, [3, (2,)], "x", [1.0, 2])
    assert [type(plain["a"]), type(plain["b"][0])] == [float, int]
