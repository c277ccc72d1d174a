"""`check(against=...)`: the same steps with another version of a package, which is installed beside for it alone."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer, TrainingArguments
from trainwright.errors import ArgumentError, ProcessFailedError
from trainwright.preflight import against

from .._support.small import data

PACKAGE = "wobble"
MODEL = """
import torch
import wobble
from torch import nn


class Wobbly(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        logits = wobble.shaken(self.head(x), self.training)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}
"""
SAME = "def shaken(x, training): return x"
VERSIONS = {
    "1.0": SAME,
    "1.1": SAME,
    "2.0": "def shaken(x, training): return x * 1.5",
    "2.1": "def shaken(x, training): return x if training else x[..., :2]",
    "3.0": "def shaken(x, training): raise TypeError('shaken is not what it was')",
}


def write_wheel(folder: Path, version: str, code: str) -> None:
    about = f"{PACKAGE}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{PACKAGE}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{PACKAGE}.py", code)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = [f"{PACKAGE}.py", f"{about}/METADATA", f"{about}/WHEEL", f"{about}/RECORD"]
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of packages on the disk; version 1.0 is installed, with a model that uses it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version, code in VERSIONS.items():
        write_wheel(wheels, version, code)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheels / f"{PACKAGE}-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(installed)
    (installed / "wobbly_model.py").write_text(textwrap.dedent(MODEL), encoding="utf-8")
    monkeypatch.syspath_prepend(installed)
    for name in (PACKAGE, "wobbly_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return wheels


def trainer(folder: Path) -> Trainer:
    args = TrainingArguments(str(folder / "run"), use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4)
    model = importlib.import_module("wobbly_model").Wobbly()
    rows = data.vectors(12)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows)


@pytest.mark.process
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.1", ["same"]),
        ("2.0", ["step 1, micro-batch 0", "forward"]),
        pytest.param("2.1", ["prediction", "shape"], marks=pytest.mark.slow),  # two more processes
        pytest.param("3.0", ["fails", "shaken is not what it was"], marks=pytest.mark.slow),  # likewise
    ],
)
def test_the_first_value_that_differs_is_named(version: str, words: list[str], index: Path, tmp_path: Path) -> None:
    one = trainer(tmp_path)
    before = [parameter.clone() for parameter in one.model.parameters()]
    found = against.check_against(one, f"{PACKAGE}=={version}", num_steps=2)
    assert found.packages == {PACKAGE: ("1.0", version)}
    assert found.is_same == (words == ["same"])
    assert all(word in str(found) for word in words), str(found)
    assert all((a == b).all() for a, b in zip(before, one.model.parameters(), strict=True))
    assert json.loads(json.dumps(found.to_dict()))["is_same"] == found.is_same


@pytest.mark.process
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (f"{PACKAGE}==", "cannot be read as a requirement"),
        (f"{PACKAGE}==9.9", "cannot be installed"),
        ("nowhere-to-be-found==1.0", "cannot be installed"),
    ],
)
def test_what_cannot_be_installed_is_an_error(wanted: str, words: str, index: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        against.check_against(trainer(tmp_path), wanted)


def test_the_installed_version_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "_planned_by_pip", lambda wanted: {})
    monkeypatch.setattr(against, "_planned_by_uv", lambda wanted: {})
    with pytest.raises(ArgumentError, match=r"changes nothing: torch .* is installed"):
        against.changed_packages(["torch"])


def test_both_installers_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    from subprocess import CompletedProcess

    plan = {"install": [{"metadata": {"name": "transformers", "version": "5.24.0"}}]}
    uv = "Resolved 20 packages\n - transformers==5.23.0\n + transformers==5.24.0\n + a-b==1.0\n"
    said: Any = CompletedProcess([], 0, stdout=json.dumps(plan), stderr=uv)
    monkeypatch.setattr(against, "_installer", lambda *command: said)
    assert against._planned_by_pip(["transformers"]) == {"transformers": "5.24.0"}
    assert against._planned_by_uv(["transformers"]) == {"transformers": "5.24.0", "a-b": "1.0"}


@pytest.mark.process
@pytest.mark.slow  # kills a process that takes as long to start as a test
def test_a_side_that_does_not_end_is_ended(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match="no end after"):
        against.check_against(trainer(tmp_path), f"{PACKAGE}==1.1", limit_s=0.5)
