"""Tiers of a run's checkpoints: its directory, and a URL with copies. Brings what a resume needs into the directory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from trainwright._types import without_tokens
from trainwright.checkpoint.async_writer import check_free_space
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.remote import RemoteStore, reason
from trainwright.checkpoint.store import CheckpointStore, flush
from trainwright.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError, TrainwrightError

logger = logging.getLogger(__name__)

WhyNot = Callable[[Checkpoint], "str | None"]


def newest_of_tiers(local: CheckpointStore, url: str, *, why_not: WhyNot) -> Checkpoint | None:
    """Returns the newest checkpoint that verifies, of a directory and a URL; one of the URL is downloaded.

    Args:
        local: the directory.
        url: the URL with copies.
        why_not: returns the problem of a checkpoint whose files are as its manifest lists them; None if it has none.

    Raises:
        CheckpointError: the URL cannot be read, and the directory has no checkpoint.
    """
    here = local.latest(lambda found: found.find_problem() or why_not(found))
    try:
        remote = RemoteStore(url)
        manifests = remote.retried(remote.manifests)
    except TrainwrightError:
        raise
    except Exception as error:
        return _unreadable(url, error, here)
    for manifest in manifests:
        if here is not None and not is_newer(manifest, here.manifest):
            return here
        problem = manifest.non_finite_mark
        if problem is None:
            try:
                found = Checkpoint(fetch(remote, manifest, local))
                problem = why_not(found)
            except CheckpointWriteError:  # no room here: an older one needs as much
                raise
            except (CheckpointError, FileNotFoundError) as error:
                problem = str(error)
            except Exception as error:
                return _unreadable(url, error, here)
            if problem is None:
                fetch_companions(remote, found, local, manifests)
                return found
        name = f"{remote}/{local.path(manifest.step).name}"
        logger.warning("Checkpoint %s is skipped: %s. Trying the one before it.", name, problem)
    return here


def _unreadable(url: str, error: Exception, here: Checkpoint | None) -> Checkpoint:
    """Returns the checkpoint of the directory where a URL cannot be read; a CheckpointError if there is none."""
    if here is None:
        raise CheckpointError(
            f"{without_tokens(url)} cannot be read ({reason(error)}), so it is not known whether it has a checkpoint "
            "to continue from. Start again when it answers, or start afresh without resume_from_checkpoint."
        ) from None
    logger.warning("%s cannot be read (%s). The run continues from %s.", without_tokens(url), reason(error), here)
    return here


def steps_ahead(url: str, manifest: Manifest) -> list[int]:
    """Returns the steps of later checkpoints of a run at a URL that verify; none if the URL cannot be read."""
    try:
        remote = RemoteStore(url)
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


def fetch(remote: RemoteStore, manifest: Manifest, local: CheckpointStore) -> Path:
    """Downloads a checkpoint into a directory, verifies it meanwhile, and returns its path there.

    Raises:
        CheckpointError: a file is missing, or not as the manifest lists it.
        CheckpointWriteError: it does not fit on the disk.
    """
    step = manifest.step
    size = sum(entry["size"] for entry in manifest.files.values())
    check_free_space(local.root, size, what=f"checkpoint-{step} of {remote}")
    logger.info("Downloading %s/%s.", remote, local.path(step).name)
    staging = local.stage(step)
    try:
        remote.download(manifest, staging)
        flush(staging)
        return local.place(staging, step)
    except BaseException:
        local.discard(staging)
        raise


def fetch_companions(
    remote: RemoteStore, checkpoint: Checkpoint, local: CheckpointStore, manifests: list[Manifest]
) -> None:
    """Downloads the best checkpoint so far and the files of the run that its directory lacks; failures are reported."""
    best = checkpoint.state.best_global_step
    run_id = None if checkpoint.manifest is None else checkpoint.manifest.run_id
    for manifest in manifests:
        if manifest.step == best and manifest.run_id == run_id and not local.path(best).is_dir():
            try:
                fetch(remote, manifest, local)
            except Exception as error:
                logger.warning("The best checkpoint so far, of step %d, is not there: %s.", best, reason(error))
    try:
        for name in remote.run_files():
            if not (local.root / name).exists():
                remote.get(name, local.root / name)
    except Exception as error:
        logger.warning("Files of the run could not be downloaded from %s: %s.", remote, reason(error))


def fetch_named(url: str, local: CheckpointStore) -> Checkpoint:
    """Downloads the checkpoint that a URL names, such as s3://bucket/run/checkpoint-500, into a directory.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it is damaged.
    """
    run_url, _, name = url.rstrip("/").rpartition("/")
    step = name.removeprefix("checkpoint-")
    remote = RemoteStore(run_url)
    manifest = remote.retried(lambda: remote.manifest(int(step))) if step.isdigit() and step != name else None
    if manifest is None:
        raise CheckpointNotFoundError(
            f"Can't find a valid checkpoint at {without_tokens(url)} (resume_from_checkpoint): it has no manifest "
            "there. Name one as s3://bucket/run/checkpoint-500, or set checkpoint_mirror and "
            "resume_from_checkpoint='auto'."
        )
    here = Checkpoint(local.path(manifest.step))
    if here.manifest is not None and here.manifest.identity == manifest.identity and here.find_problem() is None:
        return here
    return Checkpoint(fetch(remote, manifest, local))
