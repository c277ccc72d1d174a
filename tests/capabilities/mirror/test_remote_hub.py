"""Buckets of the Hugging Face Hub, as far as a stand-in on this machine goes (`tests/_support/hub_buckets.py`)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainingArguments
from trainwright.capabilities.mirror import lease as lease_module
from trainwright.capabilities.mirror import remote
from trainwright.capabilities.mirror.lease import RemoteLease
from trainwright.capabilities.mirror.remote import Copy, RemoteStore
from trainwright.capabilities.mirror.store_client import is_refusal
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import ArgumentError, CheckpointError
from trainwright.journal.record import read

from ..._support.hub_buckets import Hub, hub_server
from ..._support.small import StopAt, differing, make_trainer, weights

URL = "hf://buckets/user/name/runs/first"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.01)
    # The doubles are of this process.
    monkeypatch.setattr(remote, "_open_apart", remote._open)
    with hub_server(monkeypatch) as found:
        yield found


def saved(folder: Path, step: int) -> tuple[Path, Manifest]:
    path = folder / f"checkpoint-{step}"
    (path / "inner").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (path / "inner" / "empty").write_bytes(b"")
    return path, Manifest(step=step, run_id="run", files=describe_files(path))


def test_a_checkpoint_is_there_and_is_deleted_as_in_other_stores(tmp_path: Path, hub: Hub) -> None:
    store = RemoteStore(URL)
    assert store.manifests() == []
    for step in (2, 10):
        path, manifest = saved(tmp_path, step)
        store.upload(path, manifest)
    reader = RemoteStore(URL)
    assert [one.step for one in reader.manifests()] == [10, 2]
    assert list(reader.problems(manifest)) == []
    (tmp_path / "back").mkdir()
    reader.download(manifest, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    store.remove(Copy(10))
    assert [one.step for one in reader.manifests()] == [2], "the reader asks again"
    assert not [name for name in hub.files if "checkpoint-10" in name]


def test_an_altered_or_missing_object_is_named(tmp_path: Path, hub: Hub) -> None:
    store = RemoteStore(URL)
    path, manifest = saved(tmp_path, 2)
    store.upload(path, manifest)
    name = "runs/first/checkpoint-2/model.safetensors"
    content, digest, when = hub.files[name]
    hub.files[name] = content[:-1] + bytes([content[-1] ^ 1]), digest, when
    assert list(store.problems(manifest)) == ["model.safetensors was altered: its checksum does not match"]
    del hub.files[name]
    (tmp_path / "back").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        store.download(manifest, tmp_path / "back")


def test_a_lease_is_taken_without_a_condition_and_seen_by_others(hub: Hub) -> None:
    waits: list[float] = []
    first = RemoteLease(RemoteStore(URL), pause=waits.append)
    assert first.attempt() is None
    assert waits == [0.01], "the client looks, and writes then: no condition"
    obstacle = RemoteLease(RemoteStore(URL)).attempt()
    assert obstacle is not None
    assert obstacle.is_alive
    first.confirm()
    first.release()
    second = RemoteLease(RemoteStore(URL))
    assert second.attempt() is None
    second.release()


@pytest.mark.parametrize(("status", "bucket"), [(401, "name"), (403, "name"), (None, "other")])
def test_a_refusal_of_the_hub_ends_the_run_before_its_first_step(
    tmp_path: Path, hub: Hub, status: int | None, bucket: str
) -> None:
    hub.status = status
    url = f"hf://buckets/user/{bucket}/runs/first"
    with pytest.raises(ArgumentError, match=f"checkpoint_mirror='{url}' cannot be written"):
        make_trainer(tmp_path / "run", checkpoint_mirror=url, save_strategy="steps", max_steps=1).train()


def test_an_answer_of_a_hub_in_trouble_is_no_refusal(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(URL)
    hub.status = 500
    with pytest.raises(OSError, match="500") as caught:
        store.names()
    assert not is_refusal(caught.value)


def test_an_upload_that_fails_leaves_no_file_on_the_disk(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    store = RemoteStore(URL)
    path, manifest = saved(tmp_path, 2)
    store.names()
    hub.status = 403
    with pytest.raises(OSError, match="403"):
        store.put_part(path / "model.safetensors", manifest, "model.safetensors")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.costly
def test_a_run_with_a_bucket_goes_on_on_an_empty_machine(tmp_path: Path, hub: Hub) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    make_trainer(tmp_path / "first", checkpoint_mirror=URL, callbacks=[StopAt(4)], **settings).train()
    shutil.rmtree(tmp_path / "first")
    again = make_trainer(tmp_path / "second", checkpoint_mirror=URL, **settings)
    again.train(resume_from_checkpoint="auto")
    assert "runs/first/checkpoint-6-2/manifest.json" in hub.files
    assert read(tmp_path / "second" / "journal.jsonl").entries[0]["kind"] == "start", "the journal came along"
    assert not differing(weights(again.model), weights(whole.model))


def test_output_dir_may_be_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    args = TrainingArguments(output_dir=URL)
    assert args.checkpoint_mirror == URL
    assert Path(args.output_dir).parent == tmp_path / "cache" / "runs"
