"""Commands that read runs take a URL in the place of a directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .._support.small import make_trainer
from .._support.stores import fresh_url
from .commands import call

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two runs, whose machines are gone."""
    top = tmp_path_factory.mktemp("remote")
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "log_level": "error"}
    for name, rate in (("first", 0.01), ("second", 0.02)):
        url = (top / "store" / "runs" / name).as_uri()
        trainer = make_trainer(top / name, checkpoint_mirror=url, learning_rate=rate, **settings)
        trainer.train()
        if name == "first":
            trainer.save_model(str(top / "model"))
        shutil.rmtree(top / name)
    return top / "store" / "runs"


def test_runs_below_a_url_are_listed(store: Path) -> None:
    found = json.loads(call("runs", store.as_uri(), "--json").output)
    assert {one["name"] for one in found} == {"first", "second"}
    assert {one["steps"] for one in found} == {"4/4"}
    assert "No run is below" in call("runs", (store / "first" / "checkpoint-4-1").as_uri()).output


def test_a_report_of_a_run_at_a_url_is_written_here(store: Path) -> None:
    result = call("report", (store / "first").as_uri())
    assert result.exit_code == 0, result.output
    assert "first" in Path("report.html").read_text()
    assert "in a directory" in call("report", (store / "first").as_uri(), "--watch").output
    missing = call("report", store.as_uri())
    assert missing.exit_code == 1
    assert "There is no journal.jsonl at file:" in missing.output


def test_runs_at_urls_are_compared(store: Path) -> None:
    result = call("compare", (store / "first").as_uri(), (store / "second" / "journal.jsonl").as_uri(), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["runs"] == ["first", "second"]
    assert "learning_rate" in found["arguments"]


def test_the_model_of_a_run_at_a_url_is_exported(store: Path) -> None:
    for source, folder in (("first", "newest"), ("first/checkpoint-4", "named")):
        result = call("export", f"{store.as_uri()}/{source}", folder)
        assert result.exit_code == 0, result.output
        exported = load_file(Path(folder) / "model.safetensors")
        original = load_file(store.parents[1] / "model" / "model.safetensors")
        assert {name: value.tolist() for name, value in exported.items()} == {
            name: value.tolist() for name, value in original.items()
        }
    missing = call("export", store.as_uri(), "nothing")
    assert "There is no checkpoint at file:" in missing.output


def test_checkpoints_at_a_url_are_verified(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "first", tmp_path / "copy")
    url = (tmp_path / "copy").as_uri()
    result = call("verify", url)
    assert result.exit_code == 0, result.output
    assert re.findall(r"checkpoint-(\d)-1: intact, step \1", result.output)[-1] == "4"
    path = tmp_path / "copy" / "checkpoint-4-1" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "copy" / "checkpoint-2-1" / "manifest.json").unlink(missing_ok=True)
    result = call("verify", f"{url}/checkpoint-4")
    assert result.exit_code == 1
    assert "optimizer.pt has" in result.output
    found = json.loads(call("verify", url, "--json").output)
    assert all(one["problems"] for one in found)
    assert "in a directory" in call("verify", url, "--accept").output


@pytest.mark.process
def test_every_command_reads_a_run_on_a_server(
    store: Path, tmp_path: Path, servers: Callable[[str], dict[str, str]]
) -> None:
    import fsspec

    with fresh_url("s3", servers) as top:
        fsspec.filesystem("s3", skip_instance_cache=True).put(str(store), top, recursive=True)
        found = json.loads(call("runs", top, "--json").output)
        assert {one["name"]: one["steps"] for one in found} == {"first": "4/4", "second": "4/4"}
        assert call("report", f"{top}/first", "--output", "page.html").exit_code == 0
        assert "first" in Path("page.html").read_text()
        compared = json.loads(call("compare", f"{top}/first", f"{top}/second", "--json").output)
        assert "learning_rate" in compared["arguments"]
        verified = json.loads(call("verify", f"{top}/first", "--json").output)
        assert not any(one["problems"] for one in verified)
        assert "checkpoint-4" in verified[-1]["checkpoint"], (
            "the newest; of those before it one that waited may have been replaced"
        )
        assert call("export", f"{top}/first", "exported").exit_code == 0
        exported = load_file(Path("exported") / "model.safetensors")
        original = load_file(store.parents[1] / "model" / "model.safetensors")
        assert {name: one.tolist() for name, one in exported.items()} == {
            name: one.tolist() for name, one in original.items()
        }


def test_a_store_that_cannot_be_read_is_a_message(tmp_path: Path) -> None:
    result = call("verify", "ftq://host/run")
    assert result.exit_code == 2
    assert "ftq://host/run cannot be opened" in result.output
