"""Runs under a URL, for commands that read runs: a temporary local directory with the files a command needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from trainwright._types import RECIPE_NAME, without_tokens
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, CheckpointNotFoundError, TrainwrightError
from trainwright.journal.record import JOURNAL_NAME
from trainwright.report.run_table import DEPTH

if TYPE_CHECKING:
    from trainwright.capabilities.mirror.remote import RemoteStore

T = TypeVar("T")
Place: TypeAlias = "Path | str"  # a path, or a URL


@contextmanager
def fetch_journal(run: Place) -> Iterator[Path]:
    """Yields the directory of a run with its journal.

    Raises:
        FileNotFoundError: there is no journal at the URL.
    """
    if isinstance(run, Path):
        yield run
        return
    url = run.rstrip("/").removesuffix(f"/{JOURNAL_NAME}")
    with _copied(url, [JOURNAL_NAME]) as folder:
        if not (folder / JOURNAL_NAME).is_file():
            raise FileNotFoundError(f"There is no {JOURNAL_NAME} at {without_tokens(url)}, so it is not a run.")
        yield folder


@contextmanager
def journals_below(place: Place) -> Iterator[Path]:
    """Yields a directory with the journals of all runs below a path or URL."""
    if isinstance(place, Path):
        if not place.exists():
            raise CheckpointNotFoundError(f"There is no directory {place}.")
        yield place
        return
    with _copied(place, None) as folder:
        yield folder


@contextmanager
def fetch_checkpoint(place: Place) -> Iterator[Path]:
    """Yields the directory of a checkpoint, or of a run with its newest and its best checkpoint.

    The recipe of `trainwright train` is in the directory of the run.
    """
    if isinstance(place, Path):
        yield place
        return
    from trainwright.capabilities.mirror.sources import fetch_named, find_newest

    with _folder_for(place) as folder:
        store = CheckpointStore(folder)
        run, _, name = place.rstrip("/").rpartition("/")
        if name.startswith("checkpoint-"):
            found = fetch_named(place, store)
            remote = _open_store(run)
            if RECIPE_NAME in _reading(remote, remote.names):  # some commands read it along with the checkpoint
                _reading(remote, partial(remote.get, RECIPE_NAME, folder))
            yield found.path
            return
        if find_newest(store, place, why_not=lambda found: None) is None:
            raise CheckpointNotFoundError(f"There is no checkpoint at {without_tokens(place)}.")
        yield folder


def verified_under(url: str) -> Iterator[tuple[str, Manifest | None, list[str]]]:
    """Yields the name, the manifest and the problems of each checkpoint of a run, or of a single one named by URL.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    run_url, _, name = url.rstrip("/").rpartition("/")
    is_one = name.startswith("checkpoint-")
    remote = _open_store(run_url if is_one else url)
    found = 0
    for copy in _reading(remote, remote.copies):
        if is_one and name not in (copy.name, f"checkpoint-{copy.step}"):
            continue
        found += 1
        manifest = _reading(remote, partial(remote.manifest_in, copy))
        problems = ["manifest.json is missing or damaged"]
        if manifest is not None:
            problems = list(remote.problems(manifest))
        yield f"{remote}/{copy.name}", manifest, problems
    if found == 0:
        raise CheckpointNotFoundError(f"There is no checkpoint at {without_tokens(url)}.")


@contextmanager
def _copied(url: str, names: list[str] | None) -> Iterator[Path]:
    """Yields a directory with files from a URL; `names` is None for the journals of all runs below it."""
    with _folder_for(url) as folder:
        remote = _open_store(url)
        there = _reading(remote, partial(remote.find, ""))
        wanted = [name for name in there if _is_journal(name)] if names is None else [n for n in names if n in there]
        for name in wanted:
            _reading(remote, partial(remote.get, name, folder))
        yield folder


def _is_journal(name: str) -> bool:
    *folders, last = name.split("/")
    is_hidden = any(one.startswith((".", "checkpoint-")) for one in folders)
    return last == JOURNAL_NAME and len(folders) <= DEPTH and not is_hidden


@contextmanager
def _folder_for(url: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trainwright-") as top:
        folder = Path(top) / (url.rstrip("/").rpartition("/")[2] or "run")
        folder.mkdir()
        yield folder


def _open_store(url: str) -> RemoteStore:
    """Returns the store at a URL, as the mirror reads it."""
    from trainwright.capabilities.mirror.remote import RemoteStore

    return RemoteStore(url)


def _reading(remote: RemoteStore, call: Callable[[], T]) -> T:
    """Calls a function of a store; its errors become a CheckpointError with the reason."""
    try:
        found: T = remote.retried(call)
        return found
    except TrainwrightError:
        raise
    except Exception as error:
        from trainwright.capabilities.mirror.store_client import reason

        raise CheckpointError(f"{remote} cannot be read: {reason(error)}.") from None
