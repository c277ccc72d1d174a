"""Every check warns of its broken fixture and is content with the healthy one; the page about them lists them all."""

from __future__ import annotations

import dataclasses
import logging
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import trainwright.preflight.check_up  # noqa: F401 -- registers every check
from trainwright.preflight.check_registry import CHECKS, CheckReport, look_at
from trainwright.preflight.check_up import known_facts
from trainwright.support.findings import Finding

from .._support.small import make_trainer, models
from .fixtures import FIXTURES

PAGE = Path(__file__).parents[2] / "docs" / "check_up.md"


# Checks that find something on an accelerator alone: tests/capabilities/guard/test_checks.py, tests/accelerator.
OF_ACCELERATORS = {"step_waits"}

# Checks that cannot look at the trainer of `make_trainer`.
NEEDS_MORE = {
    "pad_is_eos",
    "metrics",
    "held_out",
    "label_forms",
    "repeated_header",
    "decimal_commas",
}


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


def test_every_check_has_fixtures() -> None:
    assert FIXTURES.keys() == {one.name for one in CHECKS.values() if one.when != "file"} - OF_ACCELERATORS


@pytest.mark.parametrize("name", FIXTURES)
def test_a_broken_trainer_is_caught(name: str, tmp_path: Path) -> None:
    report = FIXTURES[name](tmp_path, True).check()
    found = [one for one in report.of(name) if one.severity != "note"]
    assert found, str(report)
    assert all(one.evidence and one.cure for one in found)
    assert not report.is_fine
    assert name in str(report)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_healthy_trainer_passes(name: str, tmp_path: Path) -> None:
    report = FIXTURES[name](tmp_path, False).check()
    assert [one for one in report.of(name) if one.severity != "note"] == []
    assert name not in dict(report.not_done), str(report)


def test_a_healthy_trainer_has_nothing_worse_than_notes(tmp_path: Path) -> None:
    report = make_trainer(tmp_path).check()
    assert report.is_fine, str(report)
    assert report.worst == "note"
    assert dict(report.not_done).keys() == NEEDS_MORE
    assert "there is no eval_dataset" in str(report)


def test_the_gravest_comes_first_and_all_is_plain_values(tmp_path: Path) -> None:
    report = FIXTURES["vocabulary"](tmp_path, True).check()
    assert report.worst == report.findings[0].severity == "error"
    plain = report.to_dict()
    assert plain["findings"][0]["check"] == "vocabulary"
    assert str(models_vocabulary()) in plain["findings"][0]["evidence"]


def models_vocabulary() -> int:
    from .._support.small import models

    return models.VOCAB


def test_packing_against_padding_is_named_for_a_causal_model_alone(tmp_path: Path) -> None:
    cure = FIXTURES["padding"](tmp_path, True).check().of("padding")[0].cure
    assert "max_tokens_per_batch=... in place of per_device_train_batch_size" in cure
    assert "packing" not in cure
    mask = [1, 1, 0, 0, 0, 0, 0]
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7], "attention_mask": mask, "labels": mask} for _ in range(12)]
    cure = make_trainer(tmp_path, model=models.llama(), train_dataset=rows).check().of("padding")[0].cure
    assert "packing='best_fit' with packing_length=..." in cure


def test_a_check_that_fails_is_not_done_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(facts: Any) -> Any:
        raise ZeroDivisionError("by accident")
        yield

    monkeypatch.setitem(CHECKS, "padding", dataclasses.replace(CHECKS["padding"], look=fails))
    trainer = make_trainer(tmp_path, max_steps=2)
    assert dict(trainer.check().not_done)["padding"] == "ZeroDivisionError: by accident"
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 2


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    facts = known_facts(trainer, None, str(tmp_path), optimizer=None, is_brief=False)
    reasons = dict(look_at(facts, "start", "batch", "step", "full").not_done)
    assert reasons["vocabulary"] == "there is no batch to examine"
    assert reasons["in_the_optimizer"].startswith("there is no optimizer")


def test_a_report_of_nothing_is_fine() -> None:
    assert CheckReport().is_fine
    assert CheckReport().worst is None
    assert not CheckReport(findings=(Finding("warning", "seen"),)).is_fine


def test_the_page_lists_every_check() -> None:
    assert "<!-- checks -->" in PAGE.read_text(encoding="utf-8")
    hooks = runpy.run_path(str(PAGE.parents[1] / "tools" / "docs_hooks.py"))
    listed = re.findall(r"^\| `(\w+)` \| ", hooks["checks"](), flags=re.MULTILINE)
    assert sorted(listed) == sorted(CHECKS)
