"""`model.quantization` where it cannot run: one sentence, before data are read or a model is loaded."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from trainwright.cli.tasks import adapter, recipe_run

from .commands import call
from .proved import TUNED, make_base

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]

BITS = TUNED.replace("{path: base}", "{path: base, quantization: 4bit}")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with an adapter on 4-bit weights; a test fails if its data are read."""

    def load(*_: object) -> None:
        pytest.fail("data were read")

    make_base(tmp_path, steps=2)
    (tmp_path / "tuned.yaml").write_text(BITS)
    monkeypatch.setattr(recipe_run, "load", load)
    return tmp_path / "tuned.yaml"


def set_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(adapter.metadata, "version", find)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "model.quantization: 4bit needs the package bitsandbytes: pip install bitsandbytes"),
        ("0.45.1", "model.quantization: 4bit needs a GPU with bitsandbytes 0.45.1, and this machine has none."),
    ],
)
def test_it_is_said_first(version: str | None, said: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, version)
    monkeypatch.setattr(adapter, "accelerator", lambda: None)
    result = call("train", str(file))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_version_that_computes_on_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "0.50.2")
    monkeypatch.setattr(adapter, "accelerator", lambda: None)
    assert adapter.find_quantization_problem("4bit") is None


def test_an_adapter_without_its_package_is_said_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_run, "find_spec", lambda name: None)
    file.write_text(TUNED)
    result = call("train", str(file))
    assert result.exit_code == 2
    assert "lora needs the package peft: pip install peft" in result.output
