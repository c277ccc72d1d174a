"""Checkpoints under a URL of an object store: uploaded, listed, verified while they are read, deleted.

A checkpoint exists under a URL or it does not. Its files are uploaded first and its manifest last; a reader takes only
checkpoints with a sound manifest, and files with the sizes and digests that it lists. An object `.upload` lists the
files of a checkpoint that is being uploaded or deleted, so that the next run removes the leftovers of a killed run.

Each copy has a directory of its own, `checkpoint-<step>-<number>`, with the number of the lease under which it is made.
No number is used twice, so a run that was suspended, and another one has the URL now, writes and deletes nothing of
that. Only names that a manifest or an `.upload` of such a directory lists are deleted.

What copies in the background has its client in a process of its own (`process_client.py`), so training shares neither
the interpreter's lock nor random numbers with it; what reads before training begins has it here.

When a checkpoint is copied, and how often a failure is tried again, is decided in `mirror.py`. Any store that
fsspec knows will do; fsspec is imported when a store is opened.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from trainwright import capability_table
from trainwright._types import (
    MANIFEST_NAME,
    PREFIX_CHECKPOINT_DIR,
    RECIPE_NAME,
    without_tokens,
)
from trainwright.capabilities.mirror.process_client import ProcessClient, find_setup
from trainwright.capabilities.mirror.store_client import (
    FileSystem,
    has_condition,
    is_refusal,
    open_client,
    reason,
    send_file,
)
from trainwright.checkpoint.manifest import DIGEST, MAX_BYTES, FileEntry, Manifest, digest
from trainwright.errors import CheckpointError
from trainwright.journal.record import JOURNAL_NAME
from trainwright.support.deadline import HangsError, call_within
from trainwright.support.door import OwnFolder, RelativeName, parse_json

logger = logging.getLogger(__name__)

MARK_NAME = ".upload"
READ_BYTES = 8 << 20  # per request; more for large files
MOST_READ_BYTES = 32 << 20  # per request
NUM_AHEAD = 8  # requests under way while a checkpoint is read
AHEAD_BYTES = 128 << 20  # memory of a download: the sum of all requests under way
READ_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
CALL_LIMIT_S = 300.0  # of one request, which has 32 MiB at most; clients give up earlier, if they do
# Files of a run other than checkpoints that are copied too, and a directory of them.
RUN_FILES = (JOURNAL_NAME, *(file.name for file in capability_table.RUN_FILES), RECIPE_NAME)
RUN_FOLDER = "incidents"
_COPY = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]{{1,15}})(?:-([0-9]{{1,15}}))?")
# A small object in a local directory that a killed process had not finished.
_DRAFT = re.compile(r"\.\.(lease-.*|upload|manifest)\.[^/]*\.partial|\.manifest\.json\.[^/]*\.partial")

Part: TypeAlias = tuple[str, int, int]  # name of a file, and the bytes of it from a start to before a stop
_SHARED: dict[str, RemoteStore] = {}  # stores that runs of this process have open, by their URL
_CREATING = threading.RLock()  # held while an object is created in the memory of this process


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One copy of a checkpoint under a URL; number 0 is the layout of versions that had no numbers."""

    step: int
    number: int = 0  # of the lease under which it was made

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{PREFIX_CHECKPOINT_DIR}-{self.step}" + (f"-{self.number}" if self.number else "")

    @classmethod
    def parse(cls, name: str) -> Copy | None:
        """Returns the copy that a directory has; None for a name of another form."""
        match = _COPY.fullmatch(name)
        found = None if match is None else cls(int(match[1]), int(match[2] or 0))
        return found if found is not None and found.name == name else None


class RemoteStore:
    """Checkpoints, and the files of their run, under one URL.

    Errors of the store are raised as fsspec and its packages raise them.

    Args:
        url: such as `s3://bucket/run`.
        is_apart: whether the client works in a process of its own, which is right for what runs beside training. A
            file system that exists in this process alone is opened here all the same.
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
        is_apart: bool = False,
        pace: Callable[[int], None] = lambda num_bytes: None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._pace = pace
        self._pause = pause
        self._fs, self._root = (_open_apart if is_apart else _open)(self.url)
        self.is_apart = is_apart and getattr(self._fs, "is_apart", False) is True
        self._places: dict[str, Copy] = {}  # where a checkpoint is, by the identity of its manifest

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

    def _ask(self, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Calls a function of the client with a limit of time; HangsError, an OSError, if it does not return."""
        # A client in another process has a limit of its own; memory is locked by its thread, see `create`.
        if self.is_apart or self._is_any("memory"):
            return call(*args, **settings)
        return call_within(CALL_LIMIT_S, partial(call, *args, **settings), what=str(self))

    def reconnect(self) -> None:
        """Makes a new client, which reads credentials again."""
        if self.is_apart:
            self._fs.restart()
        else:
            self._fs, self._root = _open(self.url)

    def close(self) -> None:
        """Ends the process of the client, if it has one; calls that are under way fail."""
        if self.is_apart:
            self._fs.close()

    # -- which there are -----------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Returns the manifests of the checkpoints, the newest first.

        The newest run wrote last; within a run, the step decides, not the time.
        """
        return [manifest for _, manifest in self.found()]

    def found(self) -> list[tuple[Copy, Manifest]]:
        """Returns the copies with a sound manifest, in the order of `manifests`; of a step, the last lease first."""
        copies = self.copies()
        with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="trainwright-manifests") as pool:
            manifests = pool.map(self.manifest_in, copies)
            found = [(copy, one) for copy, one in zip(copies, manifests, strict=True) if one is not None]
        last: dict[str, float] = {}
        for _, one in found:
            last[one.run_id] = max(one.written_at, last.get(one.run_id, one.written_at))
        return sorted(found, key=lambda pair: (last[pair[1].run_id], pair[0]), reverse=True)

    def manifest(self, step: int) -> Manifest | None:
        """Returns the manifest of the last copy of a step that has a sound one; None if there is none."""
        copies = [copy for copy in self.copies() if copy.step == step]
        return next((one for copy in reversed(copies) if (one := self.manifest_in(copy)) is not None), None)

    def manifest_in(self, copy: Copy) -> Manifest | None:
        """Returns the manifest of a copy; None if there is none, or it is damaged or of another step."""
        path = self._path(copy, MANIFEST_NAME)
        self._forget_listings(path)
        try:
            if self._ask(self._fs.info, path)["size"] > MAX_BYTES:
                return None
            manifest = Manifest.parse(self._ask(self._fs.cat_file, path))
        except FileNotFoundError:
            return None
        if manifest is None or manifest.step != copy.step:
            return None
        self._places[manifest.identity] = copy
        return manifest

    def copies(self) -> list[Copy]:
        """Returns the copies for which there is a directory, complete or not."""
        return sorted(copy for name in self.names() if (copy := Copy.parse(name)) is not None)

    def place(self, manifest: Manifest) -> Copy:
        """Returns the copy with a manifest; without one, the last copy of its step."""
        copies: list[Copy] = []
        if manifest.identity not in self._places:
            copies = [copy for copy in self.copies() if copy.step == manifest.step]
            for copy in copies:
                self.manifest_in(copy)
        return self._places.get(manifest.identity, copies[-1] if copies else Copy(manifest.step))

    def names(self) -> list[str]:
        """Returns the names of files and directories directly under the URL; none if there is nothing."""
        self._forget_listings(self._root)
        try:
            paths = self._ask(self._fs.ls, self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def find(self, folder: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files below a directory, by their path in it."""
        top = f"{self._root}/{folder}"
        self._forget_listings(top)
        try:
            found = self._ask(self._fs.find, top, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(top).lstrip("/"): about["size"] for path, about in found.items()}

    # -- writing -------------------------------------------------------------------------------------------------------

    def upload(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        number: int = 0,
        names: Callable[[Manifest], Iterable[str]] = lambda manifest: manifest.files,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Uploads a checkpoint: its files, and then the manifest.

        Args:
            folder: the files; they are read in pieces, one after the other.
            manifest: lists them.
            number: of the lease under which it is uploaded.
            names: returns the files that this process sends, one after the other; when it ends, all files are there.
            confirm: called before the manifest is written; it raises if another run has the URL.

        Raises:
            CheckpointError: a file is not as the manifest lists it.
        """
        copy = Copy(manifest.step, number)
        for name in manifest.files:
            _parse_name(name)
        earlier = self._own_names(copy)  # of an upload under the same lease
        self._mark(copy, earlier | manifest.files.keys())
        self._delete([self._path(copy, MANIFEST_NAME)])
        for name in names(manifest):
            self.put_part(folder / name, manifest, name, number=number)
        sizes = self.find(copy.name)
        self._delete(self._path(copy, name) for name in earlier - manifest.files.keys())
        for name, entry in manifest.files.items():
            if sizes.get(name) != entry["size"]:
                self._mark(copy, manifest.files)  # a run that cleaned up meanwhile has removed it
                raise CheckpointError(f"{name} has {sizes.get(name)} bytes in {self} instead of {entry['size']}.")
        confirm()
        self._publish(copy, manifest)
        self._delete([self._path(copy, MARK_NAME)])

    def _publish(self, copy: Copy, manifest: Manifest) -> None:
        """Writes the manifest of a copy, on the condition that there is none where the store has conditions."""
        name = f"{copy.name}/{MANIFEST_NAME}"
        content = manifest.text().encode()
        try:
            self.create(name, content)
        except FileExistsError:  # ours, if the answer to a first attempt was lost on the way
            if self.read(name) != content:
                raise CheckpointError(f"{self}/{name} was written by another process meanwhile.") from None
        except (NotImplementedError, ValueError, TypeError):  # no condition: the name is this lease's all the same
            self.overwrite(name, content)
        self._places[manifest.identity] = copy

    def put_part(
        self,
        source: Path,
        manifest: Manifest,
        name: str,
        *,
        number: int = 0,
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        """Uploads one file of a checkpoint, whose manifest comes later; calls `sign` after each megabyte.

        Raises:
            CheckpointError: the file is not as the manifest lists it.
        """
        self._put(source, self._path(Copy(manifest.step, number), name), manifest.files[name], sign)

    def put(self, source: Path, name: str) -> None:
        """Uploads a file of the run, next to the checkpoints."""
        self._put(source, f"{self._root}/{name}", None)

    def _put(
        self, source: Path, path: str, expected: FileEntry | None, sign: Callable[[], None] = lambda: None
    ) -> None:
        def pace(num_bytes: int) -> None:
            self._pace(num_bytes)
            sign()

        if self.is_apart:
            value = self._ask(self._fs.send_file, source, path, pace=pace)
        else:
            value = send_file(self._fs, source, path, pace=pace, ask=self._ask)
        if expected is not None and DIGEST in expected and value != expected[DIGEST]:
            raise CheckpointError(f"{source} was altered: its checksum does not match.")

    # -- deleting ------------------------------------------------------------------------------------------------------

    def remove(self, copy: Copy) -> None:
        """Deletes a copy, its manifest first: the files that its manifest or its mark lists, and no others."""
        names = self._own_names(copy)
        self._mark(copy, names)
        self._delete([self._path(copy, MANIFEST_NAME)])
        self._delete(self._path(copy, name) for name in names)
        if self._is_local:
            self._delete(self._path(copy, name) for name in self.find(copy.name) if _DRAFT.fullmatch(name))
        self._delete([self._path(copy, MARK_NAME)])
        self._remove_folder(copy)

    def clean(self, number: int = sys.maxsize) -> None:
        """Removes the remains of interrupted uploads and deletions, of leases before one that the caller holds.

        What an older layout left has no list of its files, and stays.
        """
        for copy in self.copies():
            if not 0 < copy.number < number:
                continue
            names = self.find(copy.name)
            if not names:
                self._remove_folder(copy)
            elif MARK_NAME in names and self.manifest_in(copy) is None:
                self.remove(copy)
            elif MARK_NAME in names:
                self._delete([self._path(copy, MARK_NAME)])
        if self._is_local:
            self.delete([name for name in self.names() if _DRAFT.fullmatch(name)])
        self._abort_uploads(number)

    def _abort_uploads(self, number: int) -> None:
        """Aborts multipart uploads of S3 that earlier leases left: their parts cost money and are not listed."""
        call = getattr(self._fs, "call_s3", None)
        if call is None:
            return
        bucket, _, prefix = self._root.partition("/")
        try:
            found = self._ask(
                call, "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/{PREFIX_CHECKPOINT_DIR}-"
            )
            for one in found.get("Uploads", ()):
                copy = Copy.parse(one["Key"].removeprefix(f"{prefix}/").partition("/")[0])
                if copy is not None and 0 < copy.number < number:
                    self._ask(call, "abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
        except (OSError, NotImplementedError) as error:  # some servers, and some rights, do not know it
            logger.info("%s: unfinished uploads cannot be listed (%s).", self, reason(error))

    def _mark(self, copy: Copy, names: Iterable[str]) -> None:
        """Lists the files that are uploaded or deleted next."""
        self._ask(self._fs.pipe_file, self._path(copy, MARK_NAME), json.dumps(sorted(names)).encode())

    def _own_names(self, copy: Copy) -> set[str]:
        """Returns the files that the manifest and the mark of a copy list; a name that leads out of it is none."""
        manifest = self.manifest_in(copy)
        content = self._small(self._path(copy, MARK_NAME), max_bytes=MAX_BYTES)
        try:
            listed = parse_json(content or b"[]")
        except ValueError:
            listed = []
        found: set[str] = set()
        for name in (*(manifest.files if manifest is not None else ()), *(listed if isinstance(listed, list) else ())):
            with suppress(ValueError):
                found.add(RelativeName.parse(name))
        return found

    def _remove_folder(self, copy: Copy) -> None:
        """Removes the directory of a copy, if the store has directories and nothing is left in it."""
        if self._has_directories:
            with suppress(OSError):
                self._ask(self._fs.rmdir, f"{self._root}/{copy.name}")

    def _delete(self, paths: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._ask(self._fs.rm_file, path)

    def _forget_listings(self, path: str) -> None:
        """Lets the client ask the store again: the client of the Hub keeps listings although it is told not to."""
        self._fs.invalidate_cache(path)

    @property
    def _has_condition(self) -> bool:
        return bool(self._fs.has_condition) if self.is_apart else has_condition(self._fs)

    @property
    def _has_directories(self) -> bool:
        """Returns True for a store in which an empty directory exists."""
        return self._is_local or self._is_any("memory")

    @property
    def _is_local(self) -> bool:
        return self._is_any("file", "local")

    def _is_any(self, *names: str) -> bool:
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
            raise CheckpointError(f"{self}/{self.place(manifest).name}: {problem}")

    def fetch(self, manifest: Manifest, folder: Path, names: Iterable[str]) -> None:
        """Writes some files of a checkpoint into a directory.

        Raises:
            CheckpointError: a file is missing, or not as the manifest lists it.
        """
        place = self.place(manifest)
        files: dict[str, FileEntry] = {_parse_name(name): manifest.files[name] for name in names}
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).open("wb").close()

        def write(name: str, start: int, content: bytes) -> None:
            with (folder / name).open("r+b") as file:
                file.seek(start)
                file.write(content)

        sizes = {name: entry["size"] for name, entry in files.items()}
        for name, blocks in self._contents(place, sizes, write):
            value = xxhash.xxh3_64()
            for block in blocks:
                value.update(block)
            if value.hexdigest() != files[name].get(DIGEST) and not _has_older_digest(folder / name, files[name]):
                raise CheckpointError(f"{self}/{place.name}: {name} was altered: its checksum does not match")

    def problems(self, manifest: Manifest) -> Iterator[str]:
        """Yields all problems of a checkpoint, whose files it reads without writing them anywhere."""
        wrong_sizes = list(self._size_problems(manifest))
        if wrong_sizes:
            yield from wrong_sizes
            return
        place = self.place(manifest)
        for name, entry in manifest.files.items():
            if DIGEST not in entry:
                yield f"{name} has no checksum that can be computed while it is read"
                continue
            value = xxhash.xxh3_64()
            for _, blocks in self._contents(place, {name: entry["size"]}):
                for block in blocks:
                    value.update(block)
            if value.hexdigest() != entry[DIGEST]:
                yield f"{name} was altered: its checksum does not match"

    def _size_problems(self, manifest: Manifest) -> Iterator[str]:
        sizes = self.find(self.place(manifest).name)
        for name, entry in manifest.files.items():
            if not _is_name(name):
                yield f"{MANIFEST_NAME} names {name!r}, which lies outside of the directory"
            elif name not in sizes:
                yield f"{name} is missing"
            elif sizes[name] != entry["size"]:
                yield f"{name} has {sizes[name]} bytes instead of {entry['size']}"

    def _contents(
        self,
        copy: Copy,
        sizes: Mapping[str, int],
        use: Callable[[str, int, bytes], None] = lambda name, start, content: None,
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yields each file that is not empty with its blocks, which are to be read before the next file.

        `use` gets the name of a file, and the place and content of a block, on the thread that has fetched it.
        """

        def read(part: Part) -> bytes:
            name, start, stop = part
            content = self._read(self._path(copy, name), start, stop)
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
        found: bytes = self.retried(lambda: self._ask(self._fs.cat_file, path, start=start, end=stop))
        return found

    def retried(self, call: Callable[[], Any]) -> Any:
        """Calls a function of the store up to 5 times, with growing pauses, until it raises no passing error."""
        for attempt in range(READ_ATTEMPTS):
            try:
                return call()
            except Exception as error:
                if is_refusal(error) or isinstance(error, HangsError) or attempt == READ_ATTEMPTS - 1:
                    raise
                self._pause(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    def run_files(self) -> list[str]:
        """Returns the names of the files of the run besides its checkpoints."""
        there = self.names()
        inner = self.find(RUN_FOLDER) if RUN_FOLDER in there else {}
        below = [f"{RUN_FOLDER}/{name}" for name in inner if _is_name(name)]
        return [name for name in RUN_FILES if name in there] + below

    def get(self, name: str, folder: Path) -> None:
        """Downloads a file of the run into its directory, as a whole or not at all.

        Raises:
            OSError: a part of its name is a link there.
        """
        path = f"{self._root}/{name}"
        size = self._ask(self._fs.info, path)["size"]
        folder.mkdir(parents=True, exist_ok=True)
        with OwnFolder(folder).replacing(RelativeName.parse(name)) as file:
            file.writelines(self._blocks(_parts(path, size), lambda part: self._read(*part)))

    # -- small objects, for the lease ----------------------------------------------------------------------------------

    def create(self, name: str, content: bytes) -> None:
        """Writes a new small object, whole and at once.

        Raises:
            FileExistsError: there is one.
            NotImplementedError: the client of the store cannot create on that condition.
        """
        if not self._has_condition:
            raise NotImplementedError(
                f"{type(self._fs).__name__} creates no object on the condition that there is none"
            )
        with _CREATING if self._is_any("memory") else nullcontext():  # memory: it looks and then writes, likewise
            self._ask(self._fs.pipe_file, f"{self._root}/{name}", content, mode="create")

    def overwrite(self, name: str, content: bytes) -> None:
        """Writes a small object, whole and at once."""
        self._ask(self._fs.pipe_file, f"{self._root}/{name}", content)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if there is none. ValueError: it is not small."""
        return self._small(f"{self._root}/{name}", max_bytes=MAX_BYTES)

    def _small(self, path: str, *, max_bytes: int) -> bytes | None:
        self._forget_listings(path)
        try:
            size = self._ask(self._fs.info, path)["size"]
            if size > max_bytes:
                raise ValueError(f"{without_tokens(path)} has {size} bytes, and at most {max_bytes} are read")
            content: bytes = self._ask(self._fs.cat_file, path)
        except FileNotFoundError:
            return None
        return content

    def modified(self, name: str) -> float:
        """Returns when an object was written, in seconds since 1970, by the clock of the store."""
        path = f"{self._root}/{name}"
        self._forget_listings(path)
        # The Hub reports `uploaded_at`; its `modified` uses the clock of the writer.
        uploaded = self._ask(self._fs.info, path).get("uploaded_at")
        return float((uploaded or self._ask(self._fs.modified, path)).timestamp())

    def delete(self, names: Collection[str]) -> None:
        """Deletes small objects; missing ones are ignored."""
        self._delete(f"{self._root}/{name}" for name in names)

    def _path(self, copy: Copy, name: str) -> str:
        return f"{self._root}/{copy.name}/{name}"


def store_at(url: str) -> RemoteStore:
    """Returns the store that a run of this process has open at a URL; else a new one."""
    found = _SHARED.get(url.rstrip("/"))
    return RemoteStore(url) if found is None else found


def _parts(name: str, size: int) -> Iterator[Part]:
    """Yields the parts in which a file is read."""
    block = max(READ_BYTES, min(size // NUM_AHEAD, MOST_READ_BYTES))
    for start in range(0, size, block):
        yield name, start, min(start + block, size)


def _parse_name(name: str) -> RelativeName:
    """Returns the name of a file in a manifest; CheckpointError for one that leads out of the checkpoint."""
    try:
        return RelativeName.parse(name)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST_NAME} lists a file that is not copied: {error}.") from None


def _is_name(name: str) -> bool:
    """Returns True for a name below a directory."""
    with suppress(ValueError):
        return bool(RelativeName.parse(name))
    return False


def _has_older_digest(path: Path, entry: FileEntry) -> bool:
    """Returns True for a file with the checksum of an older kind that its manifest lists."""
    kinds = [kind for kind in entry if kind == "crc32"]
    return DIGEST not in entry and any(digest(path, kind) == entry[kind] for kind in kinds)


def _open(url: str) -> tuple[FileSystem, str]:
    """Returns a new client of a store, and the path of a URL in it."""
    found: tuple[FileSystem, str] = call_within(CALL_LIMIT_S, partial(open_client, url), what=without_tokens(url))
    return found


def _open_apart(url: str) -> tuple[FileSystem, str]:
    """Returns a client in a process of its own and the path of a URL in it; a client in this one if that must be."""
    setup = find_setup(url)
    obstacle = setup.obstacle
    if not obstacle:
        try:
            client = ProcessClient(url, setup, limit_s=lambda: CALL_LIMIT_S)
        except OSError as error:
            obstacle = f"a process of its own cannot be started ({reason(error)})"
        else:
            return client, client.root
    if setup.is_silent:
        return _open(url)
    logger.warning(
        "%s is written by a thread of this process, for which training may wait: %s.", without_tokens(url), obstacle
    )
    return _open(url)
