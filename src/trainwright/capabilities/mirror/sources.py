"""Sources of a run's checkpoints: its directory, and a URL with copies. Fetches the files that a resume needs.

All processes of a run take part. Those with one disk fetch each file once: a process its own, and a share of the
others. The main process decides which checkpoint it is, and each function has the same result, or raises the same
error, in all of them.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from trainwright._types import without_tokens
from trainwright.capabilities.mirror.remote import Copy, store_at
from trainwright.capabilities.mirror.shares import shares
from trainwright.capabilities.mirror.store_client import reason
from trainwright.checkpoint.async_writer import check_free_space
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError, TrainwrightError

logger = logging.getLogger(__name__)

WhyNot = Callable[[Checkpoint], "str | None"]
Failure = tuple[str, str]  # name of the class of an error, and its text


class StoreError(Exception):
    """The store cannot be read; the text says why."""


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointWriteError, CheckpointError, StoreError)
}


def _alone(decide: Callable[[], Any]) -> Any:
    return decide()


def _own(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, slots=True)
class DownloadGroup:
    """Processes that download a checkpoint together; a single process by default."""

    rank: int = 0  # rank of this process
    first: int = 0  # rank of the first process that has the same disk; 0 where all processes share one
    # Calls a function in the main process, and returns its result in all. Any: the result is of any type.
    agree: Callable[[Callable[[], Any]], Any] = _alone
    gather: Callable[[Any], list[Any]] = _own  # gathers an object of each process

    @property
    def leads(self) -> bool:
        """Returns True in the process that makes the directories on its disk."""
        return self.rank == self.first


ALONE = DownloadGroup()


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Context after which Python's random numbers are as before: a client that tries again draws its pauses from them.

    The process reads before it trains, and waits meanwhile.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@keeping_random_state()
def find_newest(
    local: CheckpointStore, url: str, *, why_not: WhyNot, group: DownloadGroup = ALONE
) -> Checkpoint | None:
    """Returns the newest checkpoint that verifies, of a directory and a URL; one of the URL is downloaded.

    Args:
        local: the directory.
        url: the URL with copies.
        why_not: returns the problem of a checkpoint whose files are as its manifest lists them; None if it has none.
        group: the processes that take part.

    Raises:
        CheckpointError: the URL cannot be read, and the directory has no checkpoint.
    """
    opened: list[Checkpoint] = []  # the newest one of the directory, in the main process

    def look() -> tuple[str | None, Manifest | None, list[Manifest]]:
        here = local.latest(lambda found: found.find_problem() or why_not(found))
        opened.extend([] if here is None else [here])
        try:
            remote = store_at(url)
            manifests = remote.retried(remote.manifests)
        except TrainwrightError:
            raise
        except Exception as error:
            _say_unreadable(url, reason(error), here)
            manifests = []
        return (None, None, manifests) if here is None else (here.path.name, here.manifest, manifests)

    name, manifest_here, manifests = group.agree(look)
    here: Checkpoint | None = None
    if name is not None:
        here = opened[0] if opened else Checkpoint(local.root / name)
    newer = [*takewhile(lambda one: here is None or is_newer(one, manifest_here), manifests)]
    candidates = newer
    has_several_disks = any(first != 0 for first in group.gather(group.first))
    if has_several_disks and manifest_here is not None:  # some of them may lack it
        candidates = [*newer, manifest_here, *manifests[len(newer) :]]
    for manifest in candidates:
        problem = manifest.non_finite_mark
        if problem is None:
            try:
                found = download(url, manifest, local, group, has=is_there if has_several_disks else is_identical)
                problem = group.agree(partial(why_not, found))
            except CheckpointWriteError:  # no room here: an older one needs as much
                raise
            except CheckpointError as error:
                problem = str(error)
            except StoreError as error:
                group.agree(partial(_say_unreadable, url, str(error), here))
                return here
            if problem is None:
                if manifest is not manifest_here:
                    fetch_companions(url, found, local, manifests, group)
                return opened[0] if opened and manifest is manifest_here else found
        if group.rank == 0:
            shown = f"{without_tokens(url)}/{local.path(manifest.step).name}"
            logger.warning("Checkpoint %s is skipped: %s. Trying the one before it.", shown, problem)
    return here


def _say_unreadable(url: str, why: str, here: Checkpoint | None) -> None:
    """Says that a URL cannot be read; a CheckpointError if the directory has no checkpoint to continue from."""
    if here is None:
        raise CheckpointError(
            f"{without_tokens(url)} cannot be read ({why}), so it is not known whether it has a checkpoint "
            "to continue from. Start again when it answers, or start afresh without resume_from_checkpoint."
        )
    logger.warning("%s cannot be read (%s). The run continues from %s.", without_tokens(url), why, here)


@keeping_random_state()
def find_steps_after(url: str, manifest: Manifest) -> list[int]:
    """Returns the steps of later checkpoints of a run at a URL that verify; none if the URL cannot be read."""
    try:
        remote = store_at(url)
        later = [one for one in remote.manifests() if one.run_id == manifest.run_id and one.step > manifest.step]
        return [one.step for one in later if next(remote.problems(one), None) is None]
    except Exception as error:
        logger.info("%s could not be read (%s).", without_tokens(url), reason(error))
        return []


def is_newer(one: Manifest, other: Manifest | None) -> bool:
    """Returns True if a checkpoint is newer than another: by the step within a run, else by the time of writing."""
    if other is None or one.run_id != other.run_id:
        return other is None or one.written_at > other.written_at
    return one.step > other.step


# -- downloading -------------------------------------------------------------------------------------------------------


def download(
    url: str,
    manifest: Manifest,
    local: CheckpointStore,
    group: DownloadGroup = ALONE,
    *,
    has: Callable[[Path, Manifest], bool],
) -> Checkpoint:
    """Downloads a checkpoint to each disk that lacks it, verifies it meanwhile, and returns it. All processes call it.

    It is not flushed to the disk: files lost in a crash of the machine are found by their digests, and are at the URL.

    Args:
        url: where it is.
        manifest: lists its files.
        local: the directory of this process.
        group: the processes that take part.
        has: returns True if a disk has it already, by its path there.

    Raises:
        CheckpointError: a file is missing, or not as the manifest lists it.
        CheckpointWriteError: it does not fit on the disk.
        StoreError: the store cannot be read.
    """
    path = local.path(manifest.step)
    staging: Path | None = None
    failure: Failure | None = None
    try:
        try:
            if group.leads and not has(path, manifest):
                remote = store_at(url)
                size = sum(entry["size"] for entry in manifest.files.values())
                check_free_space(local.root, size, what=f"{path.name} of {remote}")
                remote.retried(lambda: remote.check_sizes(manifest))
                logger.info("Downloading %s/%s.", remote, path.name)
                staging = local.stage(manifest.step)
        except Exception as error:
            failure = _described(error)
        told = group.gather((group.first, None if staging is None else str(staging), failure))
        _raise_first([one for _, _, one in told])
        _, folder, _ = told[group.first]
        try:
            if folder is not None:
                together = [rank for rank, (first, _, _) in enumerate(told) if first == group.first]
                if names := shares(manifest.files, together)[group.rank]:
                    store_at(url).fetch(manifest, Path(folder), names)
        except Exception as error:
            failure = _described(error)
        _raise_first(group.gather(failure))
        if staging is not None:
            manifest.write(staging)
            local.place(staging, manifest.step)
            staging = None
        group.gather(None)  # no process opens it before the renaming
    finally:
        if staging is not None:
            local.discard(staging)
    return Checkpoint(path)


def is_identical(path: Path, manifest: Manifest) -> bool:
    """Returns True if a directory has a copy of a checkpoint, and it verifies."""
    here = Checkpoint(path)
    return here.manifest is not None and here.manifest.identity == manifest.identity and here.find_problem() is None


def is_there(path: Path, manifest: Manifest) -> bool:
    """Returns True if a directory has a checkpoint of the same run and step, and it verifies.

    Its manifest may be another one: each node lists the files that it wrote itself.
    """
    here = Checkpoint(path)
    found = here.manifest
    is_same = found is not None and (found.run_id, found.step) == (manifest.run_id, manifest.step)
    return is_same and here.find_problem() is None


def _described(error: Exception) -> Failure:
    """Returns an error in a form that can be sent to other processes."""
    if isinstance(error, (CheckpointWriteError, CheckpointError)):
        kind = CheckpointWriteError if isinstance(error, CheckpointWriteError) else CheckpointError
        return kind.__name__, str(error)
    if isinstance(error, FileNotFoundError):
        return CheckpointError.__name__, str(error)
    return StoreError.__name__, reason(error)


def _raise_first(failures: list[Failure | None]) -> None:
    """Raises the first of these errors in all processes, each of which has them all."""
    for failure in failures:
        if failure is not None:
            _raise(*failure)


def _raise(kind: str, text: str) -> NoReturn:
    error = ERRORS[kind](text)
    error.is_everybodys = True  # type: ignore[attr-defined]  # no process failed before the others
    raise error


def fetch_companions(
    url: str, checkpoint: Checkpoint, local: CheckpointStore, manifests: list[Manifest], group: DownloadGroup = ALONE
) -> None:
    """Downloads the best checkpoint so far and the files of the run that its directory lacks; failures are reported."""
    best = checkpoint.state.best_global_step
    run_id = None if checkpoint.manifest is None else checkpoint.manifest.run_id
    for manifest in manifests:
        if manifest.step == best and manifest.run_id == run_id:
            try:
                download(url, manifest, local, group, has=lambda path, manifest: path.is_dir())
            except (CheckpointError, StoreError) as error:
                logger.warning("The best checkpoint so far, of step %d, is not there: %s.", best, error)
    if group.rank != 0:
        return
    remote = store_at(url)
    try:
        for name in remote.run_files():
            if not os.path.lexists(local.root / name):
                remote.get(name, local.root)
    except Exception as error:
        logger.warning("Files of the run could not be downloaded from %s: %s.", remote, reason(error))


@keeping_random_state()
def fetch_named(url: str, local: CheckpointStore, group: DownloadGroup = ALONE) -> Checkpoint:
    """Downloads the checkpoint that a URL names, such as s3://bucket/run/checkpoint-500, into a directory.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it is damaged.
    """
    run_url, _, name = url.rstrip("/").rpartition("/")

    def look() -> Manifest:
        remote = store_at(run_url)
        manifest: Manifest | None = None
        copy = Copy.parse(name)
        if copy is not None:
            read = partial(remote.manifest_in, copy) if copy.number else partial(remote.manifest, copy.step)
            manifest = remote.retried(read)
        if manifest is None:
            raise CheckpointNotFoundError(
                f"Can't find a valid checkpoint at {without_tokens(url)} (resume_from_checkpoint): it has no manifest "
                "there. Name one as s3://bucket/run/checkpoint-500, or set checkpoint_mirror and "
                "resume_from_checkpoint='auto'."
            )
        return manifest

    manifest = group.agree(look)
    try:
        return download(run_url, manifest, local, group, has=is_identical)
    except StoreError as error:
        raise CheckpointError(f"{without_tokens(url)} cannot be read: {error}.") from None
