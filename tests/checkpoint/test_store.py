"""Directories of checkpoints: there as a whole or not at all, and the newest whole one is found."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.checkpoint.manifest import Manifest, digest, find_problem
from trainwright.checkpoint.store import CheckpointStore, get_last_checkpoint, verified
from trainwright.errors import CheckpointError, CheckpointNotFoundError

FILES = {
    "model.safetensors": bytes(range(256)) * 8,
    "optimizer.pt": b"o" * 700,
    "trainer_state.json": b'{"global_step": 1}',
    "empty": b"",
    "sub/adapter_model.safetensors": b"deep" * 20,
}


def save(store: CheckpointStore, step: int, run_id: str = "me", **more: bytes) -> Path:
    staging = store.stage(step)
    for name, content in (FILES | more).items():
        path = staging / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return store.commit(staging, Manifest(step=step, run_id=run_id))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def test_nothing_has_the_final_name_before_the_commit(store: CheckpointStore) -> None:
    staging = store.stage(3)
    (staging / "model.safetensors").write_bytes(b"w")
    assert (store.steps(), store.latest()) == ([], None)
    final = store.commit(staging, Manifest(step=3, run_id="me"))
    assert (final.name, store.steps(), str(store.latest())) == ("checkpoint-3", [3], str(final))
    assert sorted(path.name for path in store.root.iterdir()) == ["checkpoint-3"]


def test_all_that_was_staged_is_there_and_listed(store: CheckpointStore) -> None:
    final = save(store, 1)
    assert content(final) == FILES
    manifest = Manifest.read(final)
    assert manifest is not None
    assert {name: entry["size"] for name, entry in manifest.files.items()} == {n: len(c) for n, c in FILES.items()}


def test_staging_starts_empty(store: CheckpointStore) -> None:
    (store.stage(1) / "rest").write_bytes(b"of a save that failed")
    assert list(store.stage(1).iterdir()) == []


def test_files_that_a_hook_wrote_under_the_final_name_are_kept(store: CheckpointStore) -> None:
    staging = store.stage(4)
    (staging / "both").write_bytes(b"ours")
    (store.path(4) / "sub").mkdir(parents=True)
    (store.path(4) / "sub" / "theirs").write_bytes(b"theirs")
    (store.path(4) / "both").write_bytes(b"theirs")
    final = store.commit(staging, Manifest(step=4, run_id="me"))
    assert content(final) == {"both": b"ours", "sub/theirs": b"theirs"}
    assert verified(final).path == final


def test_a_second_save_of_a_step_replaces_the_first(store: CheckpointStore) -> None:
    save(store, 2, only_in_the_first=b"1")
    final = save(store, 2, only_in_the_second=b"2")
    assert content(final) == {**FILES, "only_in_the_second": b"2"}
    assert verified(final).path == final
    assert [path.name for path in store.root.iterdir()] == ["checkpoint-2"]


def test_steps_are_ordered_as_numbers_and_others_are_left_alone(store: CheckpointStore) -> None:
    for step in (9, 10, 100):
        save(store, step)
    for name in ("checkpoint-my-keeper", "checkpoint-", "checkpoint-7-old", "xcheckpoint-8"):
        (store.root / name).mkdir()
    (store.root / "checkpoint-11").write_text("a file")
    assert store.steps() == [9, 10, 100]


def test_owned_are_those_that_the_run_wrote(store: CheckpointStore) -> None:
    save(store, 1, run_id="me")
    save(store, 2, run_id="another")
    store.path(3).mkdir()
    (store.path(3) / "trainer_state.json").write_text("{}")
    assert store.owned_by("me") == {1}


# -- what dead and living processes leave ----------------------------------------------------------------------------


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.process
def test_what_dead_process_left_is_removed_and_what_live_one_writes_stays(store: CheckpointStore) -> None:
    here = socket.gethostname()
    dead = dead_process()
    alive = os.getppid()
    names = {
        f".checkpoint-5.{here}.{dead}.staging": False,
        f".checkpoint-5.{here}.{alive}.staging": True,
        f".checkpoint-6.elsewhere.{dead}.staging": True,
        ".checkpoint-6.staging": True,
        ".other": True,
    }
    for name in names:
        (store.root / name).mkdir(parents=True)
        (store.root / name / "file").write_text("x")
    store.clean()
    assert {name for name in names if (store.root / name).exists()} == {name for name, stays in names.items() if stays}


def test_removing_leaves_no_half_checkpoint_under_the_final_name(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it deletes: what is left must not pass for a checkpoint of another trainer."""
    save(store, 1)
    save(store, 2)

    def deletes_a_part(path: Path, **kwargs: object) -> None:
        for name in ("manifest.json", "model.safetensors"):
            (Path(path) / name).unlink(missing_ok=True)

    monkeypatch.setattr(shutil, "rmtree", deletes_a_part)
    store.remove(1)
    monkeypatch.undo()
    assert store.steps() == [2]
    latest = store.latest()
    assert latest is not None
    assert latest.path.name == "checkpoint-2"


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def delete(path: Path) -> None:
    path.unlink()


DAMAGES: list[Callable[[Path], None]] = [truncate, lengthen, flip, delete]
CASES = [
    (name, damage) for name in FILES for damage in DAMAGES if FILES[name] or damage not in (truncate, flip)
]  # an empty file has nothing to cut or flip


@pytest.mark.parametrize(("name", "damage"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_checkpoint_is_skipped_and_named(
    name: str, damage: Callable[[Path], None], store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(store, 1)
    newer = save(store, 2)
    damage(newer / name)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert str(store.latest()) == str(older)
    assert str(newer) in caplog.text
    assert name in caplog.text
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as error:
        verified(newer)
    assert str(newer) in str(error.value)
    assert verified(older).path == older


@pytest.mark.costly
def test_no_byte_of_the_manifest_can_be_flipped_unnoticed(store: CheckpointStore) -> None:
    """Sizes and checksums, but also the step, the position in the data, and the names of its own entries."""
    staging = store.stage(7)
    (staging / "trainer_state.json").write_text("{}")
    cursor = {"epoch": 1, "samples": 12, "seed": 5, "batch_size": 4, "micro_batches": 1}
    final = store.commit(staging, Manifest(step=7, run_id="0f3a", cursor=cursor))
    path = final / "manifest.json"
    intact = path.read_bytes()
    unnoticed = []
    for position in range(len(intact)):
        for bit in (1, 64):
            flipped = bytearray(intact)
            flipped[position] ^= bit
            path.write_bytes(bytes(flipped))
            same_meaning = _parsed(bytes(flipped)) == _parsed(intact)
            if find_problem(final) is None and not same_meaning:
                unnoticed.append(intact[max(0, position - 12) : position + 12])
    assert unnoticed == []


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"step": 1}',
        '{"step": 1, "run_id": "me", "files": []}',
        '{"step": 1, "run_id": "me", "files": {"a": 1}}',
        '{"step": 1, "run_id": "me", "files": {"a": {}}}',
    ],
)
def test_a_manifest_of_another_shape_is_a_problem_and_no_crash(text: str, store: CheckpointStore) -> None:
    older = save(store, 1)
    newer = save(store, 2)
    (newer / "a").write_bytes(b"a")
    (newer / "manifest.json").write_text(text)
    assert str(store.latest()) == str(older)
    with pytest.raises(CheckpointError, match="manifest"):
        verified(newer)


def test_a_checkpoint_of_another_trainer_counts_if_its_last_file_is_there(store: CheckpointStore) -> None:
    older = save(store, 1)
    store.path(2).mkdir()
    (store.path(2) / "model.safetensors").write_bytes(b"w")
    assert str(store.latest()) == str(older)
    (store.path(2) / "trainer_state.json").write_text("{}")
    assert str(store.latest()) == str(store.path(2))


def test_a_named_checkpoint_that_is_not_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no such directory.*There is no checkpoint"):
        verified(store.root / "checkpoint-9")
    beside = save(store, 3)
    with pytest.raises(CheckpointNotFoundError) as error:
        verified(store.root / "checkpoint-9")
    assert str(beside) in str(error.value)
    assert isinstance(error.value, FileNotFoundError)
    assert isinstance(error.value, ValueError)


def test_get_last_checkpoint(store: CheckpointStore) -> None:
    assert get_last_checkpoint(store.root) is None
    save(store, 2)
    path = save(store, 10)
    assert get_last_checkpoint(str(store.root)) == str(path)


def test_a_checkpoint_with_the_older_checksums_verifies_and_damage_is_found(store: CheckpointStore) -> None:
    final = save(store, 1)
    manifest = Manifest.read(final)
    assert manifest is not None
    older = {
        name: {"size": entry["size"], "crc32": digest(final / name, "crc32")} for name, entry in manifest.files.items()
    }
    dataclasses.replace(manifest, files=older).write(final)
    assert verified(final).path == final
    flip(final / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was altered"):
        verified(final)


def test_a_checksum_of_an_unknown_kind_proves_nothing(store: CheckpointStore) -> None:
    final = save(store, 1)
    manifest = Manifest.read(final)
    assert manifest is not None
    later = {name: {"size": entry["size"], "blake9": "0"} for name, entry in manifest.files.items()}
    dataclasses.replace(manifest, files=later).write(final)
    with pytest.raises(CheckpointError, match="no checksum that this version can compute"):
        verified(final)


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    elsewhere = tmp_path / "elsewhere"
    store.path(1).rename(elsewhere)
    store.path(1).symlink_to(elsewhere, target_is_directory=True)
    store.remove(1)
    assert list(store.root.iterdir()) == []
    assert verified(elsewhere).path == elsewhere


def test_a_link_in_the_place_of_a_new_checkpoint_is_replaced_alone(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    elsewhere = tmp_path / "elsewhere"
    store.path(1).rename(elsewhere)
    store.path(1).symlink_to(elsewhere, target_is_directory=True)
    save(store, 1, more=b"x")
    assert [path.name for path in store.root.iterdir()] == ["checkpoint-1"]
    assert not store.path(1).is_symlink()
    assert verified(elsewhere).path == elsewhere


def test_a_reader_in_the_middle_of_a_commit_puts_nothing_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    rename = Path.rename

    def and_look(path: Path, target: Path) -> Path:
        result = rename(path, target)
        CheckpointStore(store.root).latest()
        return result

    monkeypatch.setattr(Path, "rename", and_look)
    assert verified(save(store, 1, more=b"x")).path == store.path(1)
    assert [path.name for path in store.root.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_may_not_be_read_is_named_and_older_one_is_taken(
    name: str, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests may run as root, whom no mode refuses, so that the refusal of the system is simulated."""
    older = save(store, 1)
    newer = save(store, 2)
    real_open = Path.open
    forbidden = newer / name

    def open_or_refuse(file: Path, *args: Any, **kwargs: Any) -> Any:
        if file == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_or_refuse)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} cannot be read: Permission denied"):
        verified(newer)
    assert str(store.latest()) == str(older)
    assert "Permission denied" in caplog.text
