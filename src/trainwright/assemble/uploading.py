"""The Hub's part of a run: what uploads, with which name and token, and how it ends."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from trainwright.hub import file_selection
from trainwright.hub.client import HubClient
from trainwright.hub.uploader import Uploader
from trainwright.journal.listener import JournalListener


def make_uploader(args: Any, keeper: JournalListener, *, token: str | None, private: bool | None) -> Uploader:
    """The uploader of an output directory; what is given wins over the arguments."""

    def tell(**values: Any) -> None:
        keeper.journal.write("push", **values)

    return Uploader(
        args.output_dir,
        file_selection.repo_name(args),
        client=hub_client(args.hub_token if token is None else token),
        private=args.hub_private_repo if private is None else private,
        revision=args.hub_revision,
        tell=tell,
    )


def hub_client(token: str | None) -> HubClient:
    return HubClient(token)


def take_up_uploads(uploader: Uploader | None) -> None:
    """A training begins: what the one before it left is sent."""
    if uploader is not None:
        uploader.take_up()


def leave_uploads(uploader: Uploader | None, error: BaseException) -> None:
    """A training ended with an error. After a signal nobody waits for uploads; they stay for the next training."""
    if uploader is not None and not isinstance(error, Exception):
        uploader.abandon()


def result_of(job: Future[Any], *, raises: bool) -> Any:
    """What a job gives when it is done; None where its error is not to be raised, and was said already."""
    error = job.exception()
    if error is not None and not raises:
        return None
    return job.result()
