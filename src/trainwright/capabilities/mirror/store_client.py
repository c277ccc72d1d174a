"""Clients of object stores: how one is opened for a URL, how it sends a file, and what its errors mean.

It is what the process that copies loads (`store_process.py`), so it imports nothing that needs torch.

Clients are those of fsspec, also for S3, GCS and Azure, where they create objects on a condition by
`pipe_file(mode="create")`. obstore 0.12 has such conditions too, but does not hold what `docs/advanced/remote.md`
promises: it reads neither `AZURE_STORAGE_CONNECTION_STRING` nor `STORAGE_EMULATOR_HOST`, takes the keys but not the
`endpoint_url` of an AWS profile, so that requests go to Amazon, and cannot list or abort the unfinished uploads of a
killed run.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from trainwright._types import without_tokens
from trainwright.capabilities.mirror.directory_client import DirectoryClient
from trainwright.errors import ArgumentError, MissingPackageError

WRITE_BYTES = 16 << 20  # per part of an upload
MAX_PARTS = 9_000  # per object; S3 allows 10,000
CHUNK_BYTES = 1 << 20  # read from the disk at once, and sent before the speed is looked at

FileSystem = Any  # fsspec's: an optional package has its class, and each store has its own


def reason(error: BaseException) -> str:
    """Returns the kind and the first line of an error, without keys."""
    text = str(error).strip().partition("\n")[0]
    return without_tokens(f"{type(error).__name__}: {text}" if text else type(error).__name__)


REFUSALS = (
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
    ArgumentError,
)


def is_refusal(error: BaseException) -> bool:
    """Returns True for an error that no second attempt cures: no permission, bucket, credentials or directory."""
    is_named = type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
    # Of the Hub: the status of the answer; of GCS: its code, or a plain OSError.
    status = getattr(getattr(error, "response", None), "status_code", getattr(error, "code", None))
    is_forbidden = status in (401, 403) or (type(error) is OSError and str(error).startswith("Forbidden: "))
    is_no_place = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
    return is_named or is_forbidden or is_no_place or isinstance(error, REFUSALS)


def open_client(url: str) -> tuple[FileSystem, str]:
    """Returns a new client of a store, and the path of a URL in it.

    Raises:
        ArgumentError: fsspec does not know such a URL.
        MissingPackageError: the package for it is missing.
    """
    import fsspec

    shown = without_tokens(url)
    try:
        found, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise MissingPackageError(
            f"{shown} cannot be opened: {error}. Install the package for this store: pip install s3fs for s3://, gcsfs "
            "for gs://, adlfs for az://."
        ) from error
    except ValueError as error:
        raise ArgumentError(f"{shown} cannot be opened: {without_tokens(str(error))}.") from None
    if getattr(found, "local_file", False):
        return DirectoryClient(root.rstrip("/") or "/"), root.rstrip("/")
    return found, root.rstrip("/")


def has_condition(client: FileSystem) -> bool:
    """Returns False for a client with fsspec's own way to create an object: it looks, and writes then."""
    from fsspec import AbstractFileSystem

    return getattr(client.pipe_file, "__func__", None) is not AbstractFileSystem.pipe_file


def call_directly(call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Calls a function of a client."""
    return call(*args, **settings)


def send_file(
    client: FileSystem,
    source: Path,
    path: str,
    *,
    pace: Callable[[int], object],
    ask: Callable[..., Any] = call_directly,
) -> str:
    """Sends a file, which is read in pieces; returns its checksum (XXH3, in hexadecimal digits).

    Args:
        client: of the store.
        source: the file.
        path: of the object.
        pace: called with the bytes that are sent next; it may wait.
        ask: calls a function of the client.
    """
    value = xxhash.xxh3_64()
    size = source.stat().st_size
    block_bytes = max(WRITE_BYTES, -(-size // MAX_PARTS // CHUNK_BYTES) * CHUNK_BYTES)
    with source.open("rb") as file, _writing(client, path, block_bytes, ask) as target:
        while block := file.read(CHUNK_BYTES):
            value.update(block)
            pace(len(block))
            ask(target.write, block)
    return value.hexdigest()


@contextmanager
def _writing(client: FileSystem, path: str, block_bytes: int, ask: Callable[..., Any]) -> Iterator[Any]:
    """Opens an object to write; after an error, the parts already sent are discarded."""
    target = ask(client.open, path, "wb", block_size=block_bytes)
    try:
        yield target
        ask(target.close)
    except BaseException:
        if not target.closed:
            with suppress(Exception):
                ask(getattr(target, "discard", target.close))  # a file of this machine has only the latter
            with suppress(Exception):
                target.closed = True  # or it would be flushed when it is freed
        with suppress(Exception):
            Path(target.temp_file.name).unlink()  # the Hub's client writes the whole file to the disk first
        raise
