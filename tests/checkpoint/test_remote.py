"""Laws of checkpoints under a URL, for every kind of store: whole or not there, and read as they were written."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright._types import MANIFEST_NAME
from trainwright.checkpoint import remote as module
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.checkpoint.remote import MARK_NAME, RemoteStore
from trainwright.errors import ArgumentError, CheckpointError, MissingPackageError

from .._support.stores import fresh_url

FILES = {"model.safetensors": b"weights" * 9_000, "empty.txt": b"", "rng/rng_state_0.pth": b"\0\1random"}


class Killed(BaseException):
    """Stands in for the end of the process: nothing that catches errors sees it."""


class Faulty:
    """A client that ends the process at a call that changes the store.

    Args:
        client: fsspec's.
        at: number of the call, from 0; None: at none.
        after: the call is made before the process ends.
    """

    def __init__(self, client: Any, at: int | None = None, *, after: bool = False) -> None:
        self._client = client
        self._at = at
        self._after = after
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._counted(found) if name in ("pipe_file", "rm_file", "rm", "open") else found

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            number = self.count
            self.count += 1
            if number == self._at and not self._after:
                raise Killed
            if number != self._at:
                return call(*args, **kwargs)
            with suppress(FileNotFoundError):
                result = call(*args, **kwargs)
                if hasattr(result, "write"):
                    result.write(b"half")
            raise Killed

        return counted


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 10_000)  # several to a file
    monkeypatch.setattr(module, "MOST_READ_BYTES", 10_000)


def written(folder: Path, step: int, run_id: str = "run", content: bytes = b"", **facts: Any) -> Manifest:
    """A checkpoint in a directory."""
    for name, value in FILES.items():
        path = folder / f"checkpoint-{step}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value + content if value else value)
    manifest = Manifest(step=step, run_id=run_id, files=describe_files(folder / f"checkpoint-{step}"), **facts)
    manifest.write(folder / f"checkpoint-{step}")
    return manifest


def uploaded(store: RemoteStore, folder: Path, step: int, **facts: Any) -> Manifest:
    manifest = written(folder, step, **facts)
    store.upload(folder / f"checkpoint-{step}", manifest)
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def raw(store: RemoteStore, name: str) -> str:
    return f"{store._root}/{name}"


def test_a_download_has_the_bytes_of_the_upload(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = uploaded(store, tmp_path / "here", 10)
    assert [one.identity for one in store.manifests()] == [manifest.identity]
    assert list(store.problems(manifest)) == []
    RemoteStore(store_url).download(manifest, tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tmp_path / "here" / "checkpoint-10")


def test_nothing_is_under_a_url_that_was_not_written(store_url: str) -> None:
    store = RemoteStore(store_url)
    assert (store.manifests(), store.names(), store.run_files()) == ([], [], [])
    store.clean()


def test_the_newest_is_that_of_the_run_that_wrote_last_then_that_of_the_highest_step(
    store_url: str, tmp_path: Path
) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 9, run_id="old", written_at=1000.0)
    uploaded(store, tmp_path, 4, run_id="new", written_at=3000.0)
    uploaded(store, tmp_path, 6, run_id="new", written_at=2000.0)  # its clock was set back
    assert [one.step for one in store.manifests()] == [6, 4, 9]


def test_an_upload_that_replaces_a_checkpoint_leaves_no_file_of_it(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = written(tmp_path, 10)
    (tmp_path / "checkpoint-10" / "old.pt").write_bytes(b"old")
    store.upload(tmp_path / "checkpoint-10", replace(manifest, files=describe_files(tmp_path / "checkpoint-10")))
    (tmp_path / "checkpoint-10" / "old.pt").unlink()
    second = uploaded(store, tmp_path, 10, content=b"2")
    assert set(store.find("checkpoint-10")) == {*FILES, MANIFEST_NAME}
    assert list(store.problems(second)) == []


def calls_of(work: Callable[[RemoteStore], object], store_url: str) -> int:
    store = RemoteStore(store_url)
    counting = Faulty(store._fs)
    store._fs = counting
    work(store)
    return counting.count


@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_ends_at_any_call_of_an_upload_leaves_the_checkpoint_before_it(
    store_url: str, tmp_path: Path, after: bool
) -> None:
    store = RemoteStore(store_url)
    older = uploaded(store, tmp_path, 10)
    newer = written(tmp_path, 20, content=b"2")
    again = written(tmp_path / "again", 20, content=b"3")

    def upload(one: RemoteStore) -> None:
        one.upload(tmp_path / "checkpoint-20", newer)

    number = calls_of(upload, store_url)
    assert number >= len(FILES) + 3
    for at in range(number):
        store.remove(20)
        store._fs = Faulty(client := store._fs, at, after=after)
        with pytest.raises(Killed):
            upload(store)
        store._fs = client
        for one in store.manifests():
            assert list(store.problems(one)) == []
        assert older.identity in [one.identity for one in store.manifests()]
        store.clean()
        is_there = any(one.step == 20 for one in store.manifests())
        assert set(store.find("checkpoint-20")) == ({*FILES, MANIFEST_NAME} if is_there else set())
        store.upload(tmp_path / "again" / "checkpoint-20", again)
        assert list(store.problems(again)) == []


@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_ends_at_any_call_of_a_deletion_leaves_a_whole_checkpoint_or_none(
    store_url: str, tmp_path: Path, after: bool
) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 20)
    number = calls_of(lambda one: one.remove(20), store_url)
    for at in range(number):
        uploaded(store, tmp_path, 20)
        store._fs = Faulty(client := store._fs, at, after=after)
        with pytest.raises(Killed):
            store.remove(20)
        store._fs = client
        for one in store.manifests():
            assert list(store.problems(one)) == []
        store.clean()
        is_there = bool(store.manifests())
        assert set(store.find("checkpoint-20")) == ({*FILES, MANIFEST_NAME} if is_there else set())


@pytest.mark.process
def test_the_parts_of_an_upload_that_was_cut_off_are_removed_from_s3(
    servers: Callable[[str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_BYTES", 5 << 20)  # the smallest part that S3 takes
    with fresh_url("s3", servers) as url:
        store = RemoteStore(url)
        bucket, _, prefix = store._root.partition("/")

        def unfinished() -> list[str]:
            found = store._fs.call_s3("list_multipart_uploads", Bucket=bucket)
            return [one["Key"] for one in found.get("Uploads", ())]

        large = tmp_path / "checkpoint-7" / "model.safetensors"
        large.parent.mkdir()
        large.write_bytes(bytes(11 << 20))
        manifest = Manifest(step=7, run_id="run", files=describe_files(large.parent))
        sent: list[int] = []

        def fails_late(num_bytes: int) -> None:
            sent.append(num_bytes)
            if sum(sent) > 8 << 20:
                raise ConnectionError("reset")

        failing = RemoteStore(url, pace=fails_late)
        with pytest.raises(ConnectionError):
            failing.upload(large.parent, manifest)
        assert unfinished() == []  # discarded at once
        parts = {"Bucket": bucket, "Key": f"{prefix}/checkpoint-7/model.safetensors"}
        store._fs.call_s3("create_multipart_upload", **parts)  # as a killed process leaves it
        store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key="of/others.bin")
        store.clean()
        assert unfinished() == ["of/others.bin"]
        assert store.find("checkpoint-7") == {}
        store.upload(large.parent, manifest)
        assert list(store.problems(manifest)) == []


MOST_OF_PARTS = 6  # parts that lie in memory at the same time, in fsspec, its clients and the connection


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # adlfs's own
@pytest.mark.parametrize("name", ["s3", "az"])  # the emulator of GCS takes no upload in parts
def test_a_large_file_is_never_in_memory_as_a_whole(
    name: str, servers: Callable[[str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 << 20
    size = 16 * part
    monkeypatch.setattr(module, "WRITE_BYTES", part)
    monkeypatch.setattr(module, "MOST_READ_BYTES", part // 2)
    monkeypatch.setattr(module, "AHEAD_BYTES", 2 * part)
    with fresh_url(name, servers) as url:
        store = RemoteStore(url)
        path = tmp_path / "checkpoint-7" / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(bytes(size))
        manifest = Manifest(step=7, run_id="run", files=describe_files(path.parent))
        works: dict[str, Callable[[], None]] = {
            "upload": lambda: store.upload(path.parent, manifest),
            "download": lambda: store.download(manifest, tmp_path / "there"),
        }
        for way, work in works.items():
            tracemalloc.start()
            try:
                work()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert part < most < MOST_OF_PARTS * part, way


def test_clean_leaves_checkpoints_that_others_put_there(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    path = tmp_path / "weights"
    path.write_bytes(b"of transformers, without a manifest")
    store.put(path, "checkpoint-3/model.safetensors")
    store.clean()
    assert set(store.find("checkpoint-3")) == {"model.safetensors"}
    assert store.manifests() == []


def alter(store: RemoteStore, name: str) -> None:
    content = bytearray(store._fs.cat_file(raw(store, name)))
    content[-1] ^= 1
    store._fs.pipe_file(raw(store, name), bytes(content))


def cut_off(store: RemoteStore, name: str) -> None:
    store._fs.pipe_file(raw(store, name), store._fs.cat_file(raw(store, name))[:-1])


def delete(store: RemoteStore, name: str) -> None:
    store._fs.rm_file(raw(store, name))


@pytest.mark.parametrize(
    ("damage", "words"), [(alter, "was altered"), (cut_off, "62999 bytes instead of 63000"), (delete, "is missing")]
)
def test_a_damaged_file_is_named_and_the_checkpoint_not_taken(
    store_url: str, tmp_path: Path, damage: Callable[[RemoteStore, str], None], words: str
) -> None:
    store = RemoteStore(store_url)
    manifest = uploaded(store, tmp_path, 10)
    damage(store, "checkpoint-10/model.safetensors")
    (problem,) = store.problems(manifest)
    assert "model.safetensors" in problem
    assert words in problem
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{words}"):
        store.download(manifest, tmp_path / "there")
    assert not (tmp_path / "there" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("damage", [alter, cut_off, delete])
def test_a_checkpoint_with_a_damaged_manifest_is_none(
    store_url: str, tmp_path: Path, damage: Callable[[RemoteStore, str], None]
) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 10)
    damage(store, f"checkpoint-10/{MANIFEST_NAME}")
    assert store.manifests() == []


def test_a_file_that_is_not_as_the_manifest_lists_it_is_not_uploaded(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = written(tmp_path, 10)
    path = tmp_path / "checkpoint-10" / "model.safetensors"
    path.write_bytes(b"W" + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        store.upload(tmp_path / "checkpoint-10", manifest)
    assert store.manifests() == []


def test_a_manifest_with_names_outside_of_the_checkpoint_writes_nothing_there(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 10)
    files = {"../../escaped": {"size": 3, "xxh3": "0" * 16}}
    with pytest.raises(CheckpointError, match="lies outside of the directory"):
        store.download(Manifest(step=10, run_id="run", files=files), tmp_path / "there" / "in")
    assert not (tmp_path / "escaped").exists()


def test_a_file_of_the_run_is_read_as_it_was_written(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    for name, content in (("journal.jsonl", b'{"kind": "log"}\n' * 2_000), ("incidents/step-3/why.json", b"{}")):
        (tmp_path / "source").write_bytes(content)
        store.put(tmp_path / "source", name)
    (tmp_path / "source").write_bytes(b"")
    store.put(tmp_path / "source", "unknown.txt")
    assert store.run_files() == ["journal.jsonl", "incidents/step-3/why.json"]
    for name in store.run_files():
        store.get(name, tmp_path / "copy" / name)
    assert (tmp_path / "copy" / "journal.jsonl").stat().st_size == 32_000
    assert (tmp_path / "copy" / "incidents/step-3/why.json").read_bytes() == b"{}"


def test_a_read_is_tried_again_with_growing_pauses_unless_it_is_refused(tmp_path: Path) -> None:
    pauses: list[float] = []
    store = RemoteStore(f"file://{tmp_path}", pause=pauses.append)
    answers: Iterator[Exception | int] = iter([ConnectionError("reset"), TimeoutError(), 7])

    def call() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert store.retried(call) == 7
    assert pauses == [0.5, 1.0]
    answers = iter([PermissionError("no"), 7])
    with pytest.raises(PermissionError):
        store.retried(call)


def test_a_url_that_no_package_knows_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="ftq://host/run cannot be opened"):
        RemoteStore("ftq://host/run")


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def lacks(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks)
    with pytest.raises(MissingPackageError, match=r"Install s3fs.*pip install 'trainwright\[remote\]'"):
        RemoteStore("s3://bucket/run")


def test_keys_in_a_url_are_in_no_message() -> None:
    with pytest.raises(ArgumentError) as caught:
        RemoteStore("ftq://user:hunter2@host/run?token=sesame")
    assert "hunter2" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_the_mark_of_an_upload_is_hidden() -> None:
    assert MARK_NAME.startswith(".")
