"""Checkpoints under a URL of an object store: uploaded, listed, verified while they are read, deleted.

A checkpoint exists under a URL or it does not. Its files are uploaded first and its manifest last; a reader takes only
checkpoints with a sound manifest, and files with the sizes and digests that it lists. An object `.upload` marks a
checkpoint that is being uploaded or deleted, so that the next run finds and removes the leftovers of a killed run.

When a checkpoint is copied, and how often a failure is tried again, is decided in `extensions/mirror`. Any store that
fsspec knows will do; fsspec is imported when a store is opened.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from trainwright._types import (
    LEDGER_NAME,
    MANIFEST_NAME,
    PREFIX_CHECKPOINT_DIR,
    QUARANTINE_NAME,
    RECIPE_NAME,
    create_file,
    without_tokens,
    write_pieces,
)
from trainwright.checkpoint.manifest import DIGEST, MAX_BYTES, FileEntry, Manifest, digest, is_outside
from trainwright.errors import ArgumentError, CheckpointError, MissingPackageError
from trainwright.journal.record import JOURNAL_NAME
from trainwright.support.own_random import give_own_random

logger = logging.getLogger(__name__)

MARK_NAME = ".upload"
READ_BYTES = 8 << 20  # per request; more for large files
MOST_READ_BYTES = 32 << 20  # per request
NUM_AHEAD = 8  # requests under way while a checkpoint is read
AHEAD_BYTES = 128 << 20  # memory of a download: the sum of all requests under way
WRITE_BYTES = 16 << 20  # per part of an upload
MAX_PARTS = 9_000  # per object; S3 allows 10,000
CHUNK_BYTES = 1 << 20  # read from the disk at once, and sent before the speed is looked at
READ_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
# Files of a run other than checkpoints that are copied too, and a directory of them.
RUN_FILES = (JOURNAL_NAME, QUARANTINE_NAME, LEDGER_NAME, RECIPE_NAME)
RUN_FOLDER = "incidents"
_FOLDER = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_DRAFT = re.compile(r"^\.\.lease-.*\.partial$")  # of a small object in a local directory

FileSystem = Any  # fsspec's: an optional package has its class, and each store has its own
Part: TypeAlias = tuple[str, int, int]  # name of a file, and the bytes of it from a start to before a stop
_SHARED: dict[str, RemoteStore] = {}  # stores that runs of this process have open, by their URL
_CREATING = threading.Lock()  # held while an object is created in the memory of this process


def reason(error: BaseException) -> str:
    """Returns the kind and the first line of an error, without keys."""
    text = str(error).strip().partition("\n")[0]
    return without_tokens(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def is_refusal(error: BaseException) -> bool:
    """Returns True for an error that no second attempt cures: no permission, no bucket, no credentials."""
    is_named = type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
    # Of the Hub: the status of the answer; of GCS: its code, or a plain OSError.
    status = getattr(getattr(error, "response", None), "status_code", getattr(error, "code", None))
    is_forbidden = status in (401, 403) or (type(error) is OSError and str(error).startswith("Forbidden: "))
    return (
        is_named
        or is_forbidden
        or isinstance(error, (PermissionError, FileNotFoundError, NotImplementedError, ArgumentError))
    )


class RemoteStore:
    """Checkpoints, and the files of their run, under one URL.

    Errors of the store are raised as fsspec and its packages raise them.

    Args:
        url: such as `s3://bucket/run`.
        pace: called with the bytes that are sent next; it may wait, which limits the speed.
        pause: waits between two attempts to read, in seconds.

    Raises:
        ArgumentError: fsspec does not know such a URL.
        MissingPackageError: the package for it is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        pace: Callable[[int], None] = lambda num_bytes: None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._pace = pace
        self._pause = pause
        self._fs, self._root = _open(self.url)

    def __str__(self) -> str:
        return without_tokens(self.url)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context in which `store_at` returns this store: a client takes a while to make, and a resume needs it too."""
        _SHARED[self.url] = self
        try:
            yield
        finally:
            _SHARED.pop(self.url, None)

    def reconnect(self) -> None:
        """Makes a new client, which reads credentials again."""
        self._fs, self._root = _open(self.url)

    # -- which there are -----------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Returns the manifests of the checkpoints, the newest first.

        The newest run wrote last; within a run, the step decides, not the time.
        """
        with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="trainwright-manifests") as pool:
            found = [one for one in pool.map(self.manifest, self.steps()) if one is not None]
        last: dict[str, float] = {}
        for one in found:
            last[one.run_id] = max(one.written_at, last.get(one.run_id, one.written_at))
        return sorted(found, key=lambda one: (last[one.run_id], one.step), reverse=True)

    def manifest(self, step: int) -> Manifest | None:
        """Returns the manifest of a checkpoint; None if there is none, or it is damaged or of another step."""
        path = self._path(step, MANIFEST_NAME)
        self._forget_listings(path)
        try:
            if self._fs.info(path)["size"] > MAX_BYTES:
                return None
            manifest = Manifest.parse(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        return manifest if manifest is not None and manifest.step == step else None

    def steps(self) -> list[int]:
        """Returns the steps of all directories of checkpoints, complete or not."""
        return sorted(int(match[1]) for name in self.names() if (match := _FOLDER.match(name)))

    def names(self) -> list[str]:
        """Returns the names of files and directories directly under the URL; none if there is nothing."""
        self._forget_listings(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def find(self, folder: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files below a directory, by their path in it."""
        top = f"{self._root}/{folder}"
        self._forget_listings(top)
        try:
            found = self._fs.find(top, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(top).lstrip("/"): about["size"] for path, about in found.items()}

    # -- writing -------------------------------------------------------------------------------------------------------

    def upload(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        names: Callable[[Manifest], Iterable[str]] = lambda manifest: manifest.files,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Uploads a checkpoint: its files, and then the manifest.

        Args:
            folder: the files; they are read in pieces, one after the other.
            manifest: lists them.
            names: returns the files that this process sends, one after the other; when it ends, all files are there.
            confirm: called before the manifest is written; it raises if another run has the URL.

        Raises:
            CheckpointError: a file is not as the manifest lists it.
        """
        step = manifest.step
        self._fs.pipe_file(self._path(step, MARK_NAME), b"")
        self._delete([self._path(step, MANIFEST_NAME)])  # left by an older checkpoint of this step
        for name in names(manifest):
            self.put_part(folder / name, manifest, name)
        sizes = self.find(_name(step))
        self._delete(self._path(step, name) for name in sizes.keys() - manifest.files.keys() - {MARK_NAME})
        for name, entry in manifest.files.items():
            if sizes.get(name) != entry["size"]:
                raise CheckpointError(f"{name} has {sizes.get(name)} bytes in {self} instead of {entry['size']}.")
        confirm()
        self._fs.pipe_file(self._path(step, MANIFEST_NAME), manifest.text().encode())
        self._delete([self._path(step, MARK_NAME)])

    def put_part(self, source: Path, manifest: Manifest, name: str, *, sign: Callable[[], None] = lambda: None) -> None:
        """Uploads one file of a checkpoint, whose manifest comes later; calls `sign` after each megabyte.

        Raises:
            CheckpointError: the file is not as the manifest lists it.
        """
        self._put(source, self._path(manifest.step, name), manifest.files[name], sign)

    def put(self, source: Path, name: str) -> None:
        """Uploads a file of the run, next to the checkpoints."""
        self._put(source, f"{self._root}/{name}", None)

    def _put(
        self, source: Path, path: str, expected: FileEntry | None, sign: Callable[[], None] = lambda: None
    ) -> None:
        value = xxhash.xxh3_64()
        size = source.stat().st_size
        block_bytes = max(WRITE_BYTES, -(-size // MAX_PARTS // CHUNK_BYTES) * CHUNK_BYTES)
        with source.open("rb") as file, self._writing(path, block_bytes) as target:
            while block := file.read(CHUNK_BYTES):
                value.update(block)
                self._pace(len(block))
                target.write(block)
                sign()
        if expected is not None and DIGEST in expected and value.hexdigest() != expected[DIGEST]:
            raise CheckpointError(f"{source} was altered: its checksum does not match.")

    @contextmanager
    def _writing(self, path: str, block_bytes: int) -> Iterator[Any]:
        """Opens an object to write; after an error, the parts already sent are discarded."""
        target = self._fs.open(path, "wb", block_size=block_bytes)
        try:
            yield target
            target.close()
        except BaseException:
            if not target.closed:
                with suppress(Exception):
                    target.discard()
                with suppress(Exception):
                    target.closed = True  # or it would be flushed when it is freed
            with suppress(Exception):
                Path(target.temp_file.name).unlink()  # the Hub's client writes the whole file to the disk first
            raise

    # -- deleting ------------------------------------------------------------------------------------------------------

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, its manifest first."""
        folder = _name(step)
        mark = self._path(step, MARK_NAME)
        self._fs.pipe_file(mark, b"")
        self._delete([self._path(step, MANIFEST_NAME)])
        self._delete(self._path(step, name) for name in self.find(folder) if name != MARK_NAME)
        self._delete([mark])
        if self._has_directories:
            with suppress(OSError):
                self._fs.rm(f"{self._root}/{folder}", recursive=True)

    def clean(self) -> None:
        """Removes the remains of interrupted uploads and deletions; only the holder of the URL may call it."""
        for step in self.steps():
            names = self.find(_name(step))
            if not names or (MARK_NAME in names and self.manifest(step) is None):
                self.remove(step)
            elif MARK_NAME in names:
                self._delete([self._path(step, MARK_NAME)])
        if self._is_local:
            self.delete([name for name in self.names() if _DRAFT.match(name)])
        self._abort_uploads()

    def _abort_uploads(self) -> None:
        """Aborts the multipart uploads of S3 that were not completed: their parts cost money and are not listed."""
        call = getattr(self._fs, "call_s3", None)
        if call is None:
            return
        bucket, _, prefix = self._root.partition("/")
        try:
            found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/{PREFIX_CHECKPOINT_DIR}-")
            for one in found.get("Uploads", ()):
                call("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
        except (OSError, NotImplementedError) as error:  # some servers, and some rights, do not know it
            logger.info("%s: unfinished uploads cannot be listed (%s).", self, reason(error))

    def _delete(self, paths: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def _forget_listings(self, path: str) -> None:
        """Lets the client ask the store again: the client of the Hub keeps listings although it is told not to."""
        self._fs.invalidate_cache(path)

    @property
    def _has_condition(self) -> bool:
        """Returns False for a client with fsspec's own way to create: it looks, and writes then."""
        from fsspec import AbstractFileSystem

        return getattr(self._fs.pipe_file, "__func__", None) is not AbstractFileSystem.pipe_file

    @property
    def _has_directories(self) -> bool:
        """Returns True for a store in which an empty directory exists."""
        return self._is_local or self._is_one_of("memory")

    @property
    def _is_local(self) -> bool:
        return self._is_one_of("file", "local")

    def _is_one_of(self, *names: str) -> bool:
        protocol = self._fs.protocol
        return not {protocol, *(protocol if isinstance(protocol, tuple) else ())}.isdisjoint(names)

    # -- reading -------------------------------------------------------------------------------------------------------

    def download(self, manifest: Manifest, folder: Path) -> None:
        """Writes the files of a checkpoint into a directory, and its manifest last.

        Raises:
            CheckpointError: a file is missing, or not as the manifest lists it; the directory is then incomplete.
        """
        self.check_sizes(manifest)
        self.fetch(manifest, folder, manifest.files)
        manifest.write(folder)

    def check_sizes(self, manifest: Manifest) -> None:
        """Raises CheckpointError for the first file of a checkpoint that is missing or has another size."""
        for problem in self._size_problems(manifest):
            raise CheckpointError(f"{self}/{_name(manifest.step)}: {problem}")

    def fetch(self, manifest: Manifest, folder: Path, names: Iterable[str]) -> None:
        """Writes some files of a checkpoint into a directory.

        Raises:
            CheckpointError: a file is missing, or not as the manifest lists it.
        """
        files = {name: manifest.files[name] for name in names}
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).open("wb").close()

        def write(name: str, start: int, content: bytes) -> None:
            with (folder / name).open("r+b") as file:
                file.seek(start)
                file.write(content)

        sizes = {name: entry["size"] for name, entry in files.items()}
        for name, blocks in self._contents(manifest.step, sizes, write):
            value = xxhash.xxh3_64()
            for block in blocks:
                value.update(block)
            if value.hexdigest() != files[name].get(DIGEST) and not _has_older_digest(folder / name, files[name]):
                raise CheckpointError(f"{self}/{_name(manifest.step)}: {name} was altered: its checksum does not match")

    def problems(self, manifest: Manifest) -> Iterator[str]:
        """Yields all problems of a checkpoint, whose files it reads without writing them anywhere."""
        wrong_sizes = list(self._size_problems(manifest))
        if wrong_sizes:
            yield from wrong_sizes
            return
        for name, entry in manifest.files.items():
            if DIGEST not in entry:
                yield f"{name} has no checksum that can be computed while it is read"
                continue
            value = xxhash.xxh3_64()
            for _, blocks in self._contents(manifest.step, {name: entry["size"]}):
                for block in blocks:
                    value.update(block)
            if value.hexdigest() != entry[DIGEST]:
                yield f"{name} was altered: its checksum does not match"

    def _size_problems(self, manifest: Manifest) -> Iterator[str]:
        sizes = self.find(_name(manifest.step))
        for name, entry in manifest.files.items():
            if is_outside(name):
                yield f"{MANIFEST_NAME} names {name!r}, which lies outside of the directory"
            elif name not in sizes:
                yield f"{name} is missing"
            elif sizes[name] != entry["size"]:
                yield f"{name} has {sizes[name]} bytes instead of {entry['size']}"

    def _contents(
        self,
        step: int,
        sizes: Mapping[str, int],
        use: Callable[[str, int, bytes], None] = lambda name, start, content: None,
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yields each file that is not empty with its blocks, which are to be read before the next file.

        `use` gets the name of a file, and the place and content of a block, on the thread that has fetched it.
        """

        def read(part: Part) -> bytes:
            name, start, stop = part
            content = self._read(self._path(step, name), start, stop)
            use(name, start, content)
            return content

        fetched = self._blocks((part for name, size in sizes.items() for part in _parts(name, size)), read)

        def blocks(number: int) -> Iterator[bytes]:
            for _ in range(number):
                yield next(fetched)

        try:
            for name, size in sizes.items():
                if size > 0:
                    yield name, blocks(sum(1 for _ in _parts(name, size)))
        finally:
            fetched.close()

    def _blocks(self, parts: Iterable[Part], read: Callable[[Part], bytes]) -> Any:  # a generator, which is closed
        """Yields the bytes of parts of files in their order; a few are requested ahead, in parallel."""
        ahead: deque[tuple[Future[bytes], int]] = deque()
        ahead_bytes = 0
        with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="trainwright-download") as pool:
            try:
                for part in parts:
                    _, start, stop = part
                    num_bytes = stop - start
                    while ahead and (len(ahead) == NUM_AHEAD or ahead_bytes + num_bytes > AHEAD_BYTES):
                        future, size = ahead.popleft()
                        yield future.result()
                        del future
                        ahead_bytes -= size
                    ahead.append((pool.submit(read, part), num_bytes))
                    ahead_bytes += num_bytes
                while ahead:
                    future, _ = ahead.popleft()
                    yield future.result()
                    del future
            finally:
                for one, _ in ahead:
                    one.cancel()

    def _read(self, path: str, start: int, stop: int) -> bytes:
        found: bytes = self.retried(lambda: self._fs.cat_file(path, start=start, end=stop))
        return found

    def retried(self, call: Callable[[], Any]) -> Any:
        """Calls a function of the store up to 5 times, with growing pauses, until it raises no passing error."""
        for attempt in range(READ_ATTEMPTS):
            try:
                return call()
            except Exception as error:
                if is_refusal(error) or attempt == READ_ATTEMPTS - 1:
                    raise
                self._pause(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    def run_files(self) -> list[str]:
        """Returns the names of the files of the run besides its checkpoints."""
        there = self.names()
        inner = self.find(RUN_FOLDER) if RUN_FOLDER in there else {}
        below = [f"{RUN_FOLDER}/{name}" for name in inner if not is_outside(name)]
        return [name for name in RUN_FILES if name in there] + below

    def get(self, name: str, target: Path) -> None:
        """Downloads a file of the run, as a whole or not at all."""
        path = f"{self._root}/{name}"
        size = self._fs.info(path)["size"]
        target.parent.mkdir(parents=True, exist_ok=True)
        write_pieces(target, self._blocks(_parts(path, size), lambda part: self._read(*part)))

    # -- small objects, for the lease ----------------------------------------------------------------------------------

    def create(self, name: str, content: bytes) -> None:
        """Writes a new small object, whole and at once.

        Raises:
            FileExistsError: there is one.
            NotImplementedError: the client of the store cannot create on that condition.
        """
        path = f"{self._root}/{name}"
        if self._is_local:  # fsspec looks and then writes: two runs may both find nothing
            create_file(path, content)
            return
        if not self._has_condition:
            raise NotImplementedError(
                f"{type(self._fs).__name__} creates no object on the condition that there is none"
            )
        with _CREATING if self._has_directories else nullcontext():  # memory: it looks and then writes, likewise
            self._fs.pipe_file(path, content, mode="create")

    def overwrite(self, name: str, content: bytes) -> None:
        """Writes a small object, whole and at once."""
        path = f"{self._root}/{name}"
        if self._is_local:  # else a reader may find it empty
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_pieces(path, [content])
            return
        self._fs.pipe_file(path, content)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if there is none."""
        path = f"{self._root}/{name}"
        self._forget_listings(path)
        try:
            content: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def modified(self, name: str) -> float:
        """Returns when an object was written, in seconds since 1970, by the clock of the store."""
        path = f"{self._root}/{name}"
        self._forget_listings(path)
        uploaded = self._fs.info(path).get("uploaded_at")  # of the Hub, where `modified` is by the writer's clock
        return float((uploaded or self._fs.modified(path)).timestamp())

    def delete(self, names: Collection[str]) -> None:
        """Deletes small objects; missing ones are ignored."""
        self._delete(f"{self._root}/{name}" for name in names)

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{_name(step)}/{name}"


def store_at(url: str) -> RemoteStore:
    """Returns the store that a run of this process has open at a URL; else a new one."""
    found = _SHARED.get(url.rstrip("/"))
    return RemoteStore(url) if found is None else found


def _parts(name: str, size: int) -> Iterator[Part]:
    """Yields the parts in which a file is read."""
    block = max(READ_BYTES, min(size // NUM_AHEAD, MOST_READ_BYTES))
    for start in range(0, size, block):
        yield name, start, min(start + block, size)


def _name(step: int) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _has_older_digest(path: Path, entry: FileEntry) -> bool:
    """Returns True for a file with the checksum of an older kind that its manifest lists."""
    kinds = [kind for kind in entry if kind == "crc32"]
    return DIGEST not in entry and any(digest(path, kind) == entry[kind] for kind in kinds)


def _open(url: str) -> tuple[FileSystem, str]:
    """Returns a new client of a store, and the path of a URL in it."""
    import fsspec

    shown = without_tokens(url)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if url.partition("://")[0] in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        found, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingPackageError(
            f"{shown} cannot be opened: {error}. Install the packages for S3 and GCS with "
            "pip install 'trainwright[remote]'; others have a package of their own, such as adlfs for az://."
        ) from error
    except ValueError as error:
        raise ArgumentError(f"{shown} cannot be opened: {without_tokens(str(error))}.") from None
    give_own_random()  # now that the client is imported
    return found, root.rstrip("/")
