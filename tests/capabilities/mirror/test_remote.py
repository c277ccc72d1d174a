"""Laws of checkpoints under a URL, for every kind of store: whole or not there, and read as they were written."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright._types import MANIFEST_NAME
from trainwright.capabilities.mirror import remote as module
from trainwright.capabilities.mirror import store_client
from trainwright.capabilities.mirror.remote import MARK_NAME, Copy, RemoteStore
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import ArgumentError, CheckpointError, MissingPackageError

from ..._support.stores import fresh_url

NUMBER = 3  # of the lease under which copies are made
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
                if isinstance(result, io.BufferedWriter):  # of this machine, which would warn that it is open
                    result.close()
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
    store.upload(folder / f"checkpoint-{step}", manifest, number=NUMBER)
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


def test_the_newest_is_by_last_writer_then_by_step(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 9, run_id="old", written_at=1000.0)
    uploaded(store, tmp_path, 4, run_id="new", written_at=3000.0)
    uploaded(store, tmp_path, 6, run_id="new", written_at=2000.0)  # its clock was set back
    assert [one.step for one in store.manifests()] == [6, 4, 9]


def test_an_upload_that_replaces_a_checkpoint_leaves_no_file_of_it(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = written(tmp_path, 10)
    (tmp_path / "checkpoint-10" / "old.pt").write_bytes(b"old")
    store.upload(
        tmp_path / "checkpoint-10", replace(manifest, files=describe_files(tmp_path / "checkpoint-10")), number=NUMBER
    )
    (tmp_path / "checkpoint-10" / "old.pt").unlink()
    second = uploaded(store, tmp_path, 10, content=b"2")
    assert set(store.find("checkpoint-10-3")) == {*FILES, MANIFEST_NAME}
    assert list(store.problems(second)) == []


def calls_of(work: Callable[[RemoteStore], object], store_url: str) -> int:
    store = RemoteStore(store_url)
    counting = Faulty(store._fs)
    store._fs = counting
    work(store)
    return counting.count


@pytest.mark.parametrize("after", [False, True])
def test_process_that_ends_at_any_call_of_upload_leaves_checkpoint_before_it(
    store_url: str, tmp_path: Path, after: bool
) -> None:
    store = RemoteStore(store_url)
    older = uploaded(store, tmp_path, 10)
    newer = written(tmp_path, 20, content=b"2")
    again = written(tmp_path / "again", 20, content=b"3")

    def upload(one: RemoteStore) -> None:
        one.upload(tmp_path / "checkpoint-20", newer, number=NUMBER)

    number = calls_of(upload, store_url)
    assert number >= len(FILES) + 3
    for at in range(number):
        store.remove(Copy(20, NUMBER))
        store._fs = Faulty(client := store._fs, at, after=after)
        with pytest.raises(Killed):
            upload(store)
        store._fs = client
        for one in store.manifests():
            assert list(store.problems(one)) == []
        assert older.identity in [one.identity for one in store.manifests()]
        store.clean()
        is_there = any(one.step == 20 for one in store.manifests())
        assert set(store.find("checkpoint-20-3")) == ({*FILES, MANIFEST_NAME} if is_there else set())
        store.upload(tmp_path / "again" / "checkpoint-20", again, number=NUMBER)
        assert list(store.problems(again)) == []


@pytest.mark.parametrize("after", [False, True])
def test_process_that_ends_at_call_of_deletion_leaves_whole_checkpoint_or_none(
    store_url: str, tmp_path: Path, after: bool
) -> None:
    store = RemoteStore(store_url)
    uploaded(store, tmp_path, 20)
    number = calls_of(lambda one: one.remove(Copy(20, NUMBER)), store_url)
    for at in range(number):
        uploaded(store, tmp_path, 20)
        store._fs = Faulty(client := store._fs, at, after=after)
        with pytest.raises(Killed):
            store.remove(Copy(20, NUMBER))
        store._fs = client
        for one in store.manifests():
            assert list(store.problems(one)) == []
        store.clean()
        is_there = bool(store.manifests())
        assert set(store.find("checkpoint-20-3")) == ({*FILES, MANIFEST_NAME} if is_there else set())


@pytest.mark.process
def test_the_parts_of_upload_that_was_cut_off_are_removed_from_s3(
    servers: Callable[[str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client, "WRITE_BYTES", 5 << 20)  # the smallest part that S3 takes
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
            failing.upload(large.parent, manifest, number=NUMBER)
        assert unfinished() == []  # discarded at once
        parts = {"Bucket": bucket, "Key": f"{prefix}/checkpoint-7-3/model.safetensors"}
        store._fs.call_s3("create_multipart_upload", **parts)  # as a killed process leaves it
        store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key="of/others.bin")
        store.clean()
        assert unfinished() == ["of/others.bin"]
        assert store.find("checkpoint-7-3") == {}
        store.upload(large.parent, manifest, number=NUMBER)
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
    monkeypatch.setattr(store_client, "WRITE_BYTES", part)
    monkeypatch.setattr(module, "MOST_READ_BYTES", part // 2)
    monkeypatch.setattr(module, "AHEAD_BYTES", 2 * part)
    with fresh_url(name, servers) as url:
        store = RemoteStore(url)
        path = tmp_path / "checkpoint-7" / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(bytes(size))
        manifest = Manifest(step=7, run_id="run", files=describe_files(path.parent))
        works: dict[str, Callable[[], None]] = {
            "upload": lambda: store.upload(path.parent, manifest, number=NUMBER),
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
    damage(store, "checkpoint-10-3/model.safetensors")
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
    damage(store, f"checkpoint-10-3/{MANIFEST_NAME}")
    assert store.manifests() == []


def test_file_that_is_not_as_the_manifest_lists_it_is_not_uploaded(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = written(tmp_path, 10)
    path = tmp_path / "checkpoint-10" / "model.safetensors"
    path.write_bytes(b"W" + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        store.upload(tmp_path / "checkpoint-10", manifest, number=NUMBER)
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
        store.get(name, tmp_path / "copy")
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
    with pytest.raises(MissingPackageError, match=r"Install s3fs.*pip install s3fs for s3://"):
        RemoteStore("s3://bucket/run")


def test_keys_in_a_url_are_in_no_message() -> None:
    with pytest.raises(ArgumentError) as caught:
        RemoteStore("ftq://user:hunter2@host/run?token=sesame")
    assert "hunter2" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_the_mark_of_an_upload_is_hidden() -> None:
    assert MARK_NAME.startswith(".")


# -- links in a shared directory, and names of others ------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of somebody, with files of the names that a mirror writes."""
    folder = tmp_path / "victim"
    for name in (*FILES, MARK_NAME, MANIFEST_NAME, "diary.txt", "journal.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of the victim")
    return folder


def is_whole(victim: Path) -> bool:
    found = contents(victim)
    return len(found) == len(FILES) + 4 and set(found.values()) == {b"of the victim"}


def plant(root: Path, name: str, target: Path, kind: str) -> None:
    """Puts a link to a file or a directory of the victim into the mirror."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    if kind == "hard":
        (root / name).hardlink_to(target)
    else:
        (root / name).symlink_to(target)


PLANTED = [
    ("checkpoint-10-3", ""),
    ("checkpoint-10-3/rng", "rng"),
    ("checkpoint-10-3/model.safetensors", "model.safetensors"),
    (f"checkpoint-10-3/{MARK_NAME}", MARK_NAME),
    (f"checkpoint-10-3/{MANIFEST_NAME}", MANIFEST_NAME),
    ("checkpoint-10-2", ""),
    ("checkpoint-10", ""),
    (f"checkpoint-9-2/{MARK_NAME}", MARK_NAME),
    ("checkpoint-9-2/rng", "rng"),
    ("journal.jsonl", "journal.jsonl"),
    ("incidents", ""),
    (".lease-1.json", "diary.txt"),
]


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("form", ["file://", "", "local://"])
@pytest.mark.parametrize(("name", "target"), PLANTED)
def test_link_in_a_shared_directory_leads_to_no_write_and_no_deletion(
    name: str, target: str, form: str, kind: str, victim: Path, tmp_path: Path
) -> None:
    if kind == "hard" and (victim / target).is_dir():
        pytest.skip("a directory has no second name")
    root = tmp_path / "mirror"
    plant(root, name, victim / target, kind)
    (root / "checkpoint-9-2").mkdir(exist_ok=True)
    mark = root / "checkpoint-9-2" / MARK_NAME
    if not mark.exists():
        mark.write_text('["rng/rng_state_0.pth", "model.safetensors", "../../victim/diary.txt"]')
    store = RemoteStore(f"{form}{root}")
    manifest = written(tmp_path / "run", 10)
    (tmp_path / "journal").write_bytes(b"of the run")
    for call in (
        lambda: store.clean(NUMBER),
        lambda: store.upload(tmp_path / "run" / "checkpoint-10", manifest, number=NUMBER),
        lambda: store.put(tmp_path / "journal", "journal.jsonl"),
        lambda: store.put(tmp_path / "journal", "incidents/diary.txt"),
        lambda: store.overwrite(".lease-1.json", b"{}"),
        lambda: store.delete([".lease-1.json", "journal.jsonl"]),
        *[lambda copy=copy: store.remove(copy) for copy in (Copy(10), Copy(10, 2), Copy(10, 3), Copy(9, 2))],
    ):
        with suppress(OSError):
            call()
        assert is_whole(victim)


def test_the_directory_of_a_mirror_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mirror").symlink_to(tmp_path / "disk")
    store = RemoteStore(f"file://{tmp_path}/mirror/run")
    manifest = uploaded(store, tmp_path / "here", 10)
    assert list(store.problems(manifest)) == []
    assert (tmp_path / "disk" / "run" / "checkpoint-10-3" / "model.safetensors").is_file()


def test_an_upload_into_a_linked_directory_says_what_is_in_the_way(tmp_path: Path, victim: Path) -> None:
    plant(tmp_path / "mirror", "checkpoint-10-3", victim, "soft")
    manifest = written(tmp_path, 10)
    with pytest.raises(OSError, match="copies follow no link") as caught:
        RemoteStore(f"file://{tmp_path}/mirror").upload(tmp_path / "checkpoint-10", manifest, number=NUMBER)
    assert "checkpoint-10-3" in str(caught.value)


HOSTILE_NAMES = ["../away", "/etc/away", "a/../../away", "a\\..\\away", "C:/away", "a//b", ".", "", "a\nb"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_mark_or_manifest_of_stranger_deletes_only_what_it_lists_in_directory(
    store_url: str, name: str, tmp_path: Path
) -> None:
    store = RemoteStore(store_url)
    for there in ("away", "checkpoint-9-2/kept", "checkpoint-9-2/deep/away"):
        store.overwrite(there, b"of another")
    before = store.find("")
    listed = [name, *(value for value in (None, 7, [1], {"a": 1}))]
    store.overwrite(f"checkpoint-9-2/{MARK_NAME}", json.dumps(listed).encode())
    store.clean(NUMBER)
    assert store.find("") == before
    hostile = Manifest(step=9, run_id="run", files={name: {"size": 10}}).text()
    store.overwrite(f"checkpoint-9-2/{MANIFEST_NAME}", hostile.encode())
    store.remove(Copy(9, 2))
    assert store.find("") == before


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{}", b"1" * 50, b'"model"', b""])
def test_a_mark_that_is_no_list_deletes_nothing(store_url: str, content: bytes) -> None:
    store = RemoteStore(store_url)
    store.overwrite("checkpoint-9-2/model.safetensors", b"of another")
    store.overwrite(f"checkpoint-9-2/{MARK_NAME}", content)
    store.clean(NUMBER)
    assert "model.safetensors" in store.find("checkpoint-9-2")


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-007",
        "checkpoint-7-",
        "checkpoint-7-0",
        "checkpoint-7-03",
        "checkpoint-\u0667",
        "checkpoint-7-3\n",
        "checkpoint-" + "9" * 400,
        "checkpoint--7",
        "checkpoint-7-3-1",
    ],
)
def test_names_that_are_no_copies(name: str) -> None:
    assert Copy.parse(name) is None


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run[!a]"])
def test_glob_characters_in_a_url_are_letters(name: str, tmp_path: Path) -> None:
    top = f"memory://{tmp_path.name}-{abs(hash(name))}"
    others = [RemoteStore(f"{top}/{other}") for other in ("run1", "run", "runs", "runb", "run/deep")]
    kept = [uploaded(other, tmp_path / str(number), 10) for number, other in enumerate(others)]
    store = RemoteStore(f"{top}/{name}")
    uploaded(store, tmp_path / "mine", 10)
    store.remove(Copy(10, NUMBER))
    store.clean()
    assert store.manifests() == []
    for other, manifest in zip(others, kept, strict=True):
        assert list(other.problems(manifest)) == []


# -- two leases, and the layout before ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_a_run_suspended_in_an_upload_changes_nothing_of_the_next(store_url: str, tmp_path: Path, after: bool) -> None:
    late = written(tmp_path / "late", 20, content=b"late")
    newer = written(tmp_path / "newer", 20, content=b"newer")

    def upload(one: RemoteStore) -> None:
        one.upload(tmp_path / "late" / "checkpoint-20", late, number=NUMBER)

    number = calls_of(upload, store_url)
    RemoteStore(store_url).remove(Copy(20, NUMBER))
    for at in range(number):
        store = RemoteStore(store_url)

        def takes_over(store: RemoteStore = store) -> None:
            store.clean(NUMBER + 1)
            store.upload(tmp_path / "newer" / "checkpoint-20", newer, number=NUMBER + 1)

        suspended = RemoteStore(store_url)
        suspended._fs = Suspended(suspended._fs, at, after=after, meanwhile=takes_over)
        with suppress(CheckpointError):  # its files are gone
            upload(suspended)
        assert store.manifest(20) == newer
        assert list(store.problems(newer)) == []
        store.clean(NUMBER + 2)
        store.remove(Copy(20, NUMBER))
        store.remove(Copy(20, NUMBER + 1))
        assert set(store.find("")) == set()


class Suspended(Faulty):
    """A client that is suspended at a call that changes the store, while another run does something."""

    def __init__(self, client: Any, at: int, *, after: bool, meanwhile: Callable[[], object]) -> None:
        super().__init__(client, at, after=after)
        self._meanwhile = meanwhile

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            number = self.count
            self.count += 1
            if number == self._at and not self._after:
                self._meanwhile()
            try:
                return call(*args, **kwargs)
            finally:
                if number == self._at and self._after:
                    self._meanwhile()

        return counted


def test_the_layout_without_numbers_is_read_and_removed_by_its_manifest(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    older = written(tmp_path, 10)
    store.upload(tmp_path / "checkpoint-10", older)
    store.overwrite(f"checkpoint-20/{MARK_NAME}", b"")  # an interrupted upload
    store.overwrite("checkpoint-20/model.safetensors", b"half")
    store.clean()
    assert set(store.find("checkpoint-10")) == {*FILES, MANIFEST_NAME}
    assert "model.safetensors" in store.find("checkpoint-20")
    RemoteStore(store_url).download(older, tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tmp_path / "checkpoint-10")
    store.remove(Copy(10))
    assert store.find("checkpoint-10") == {}


def test_checkpoint_of_another_trainer_stays_next_to_copy_of_the_same_step(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    (tmp_path / "weights").write_bytes(b"of transformers")
    store.put(tmp_path / "weights", "checkpoint-10/model.safetensors")
    store.put(tmp_path / "weights", "checkpoint-10/scheduler.pt")
    manifest = uploaded(store, tmp_path, 10)
    assert list(store.problems(manifest)) == []
    store.remove(Copy(10, NUMBER))
    store.clean()
    assert set(store.find("checkpoint-10")) == {"model.safetensors", "scheduler.pt"}


def test_a_manifest_is_written_on_the_condition_that_there_is_none(store_url: str, tmp_path: Path) -> None:
    store = RemoteStore(store_url)
    manifest = written(tmp_path, 10)
    other = written(tmp_path / "other", 10, content=b"2")

    def another_comes_first() -> None:
        store.overwrite(f"checkpoint-10-3/{MANIFEST_NAME}", other.text().encode())

    with pytest.raises(CheckpointError, match="was written by another process"):
        store.upload(tmp_path / "checkpoint-10", manifest, number=NUMBER, confirm=another_comes_first)

    def an_answer_is_lost() -> None:
        store.overwrite(f"checkpoint-10-3/{MANIFEST_NAME}", manifest.text().encode())

    store.upload(tmp_path / "checkpoint-10", manifest, number=NUMBER, confirm=an_answer_is_lost)
    assert store.manifests() == [manifest]
