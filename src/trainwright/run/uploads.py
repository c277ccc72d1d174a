"""Uploads of a trainer to the Hub: none, until a repository is opened. What an upload is, is in `hub/`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.hub.uploader import Uploader
    from trainwright.journal.record import JournalListener


class Uploads:
    """Brings models and checkpoints to one repository. Only the first process of all opens one."""

    def __init__(self) -> None:
        self._uploader: Uploader | None = None
        self.in_progress: Any = None

    def open(self, args: Any, journal: JournalListener, *, token: str | None, private: bool | None) -> str:
        """Makes the repository unless it is there, and returns its name; what is given wins over the arguments."""
        from trainwright.hub import file_selection
        from trainwright.hub.client import HubClient
        from trainwright.hub.uploader import Uploader

        def tell(**values: Any) -> None:
            journal.journal.write("push", **values)

        self._uploader = Uploader(
            args.output_dir,
            file_selection.repo_name(args),
            client=HubClient(args.hub_token if token is None else token),
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
            tell=tell,
        )
        self.in_progress = None
        return self._uploader.open()

    def model_name(self, args: Any) -> str:
        """The name of the repository without its owner."""
        from trainwright.hub import file_selection

        return file_selection.repo_name(args).rpartition("/")[2]

    def start(self) -> None:
        """A training begins: what the one before it left is sent."""
        if self._uploader is not None:
            self._uploader.take_up()

    def abandon_after(self, error: BaseException) -> None:
        """A training ended with an error. After a signal nobody waits for uploads; they stay for the next training."""
        if self._uploader is not None and not isinstance(error, Exception):
            self._uploader.abandon()

    def push_root(
        self, message: str | None, *, token: str | None, revision: str | None, is_training: bool, step: int
    ) -> Future[Any]:
        """Uploads what lies in the output directory; in the middle of a training it may be tried again at the end."""
        from trainwright.hub.client import HubClient

        assert self._uploader is not None
        other = None if token is None else HubClient(token)
        return self._uploader.push_root(message, client=other, revision=revision, holds=is_training, step=step)

    def push_checkpoint(
        self,
        folder: Path,
        args: Any,
        state: Any,
        *,
        when_there: Callable[[Callable[[bool], None]], None],
        announce: Callable[[], None],
    ) -> None:
        """Uploads a checkpoint as `hub_strategy` says, asynchronously, one at a time.

        What is saved while another upload is under way waits for the end of the training, unless `hub_always_push`.
        `when_there` calls its argument when the checkpoint is on disk; `announce` is called if the upload starts now.
        """
        from trainwright.hub import file_selection

        strategy = file_selection.strategy_of(args)
        if self._uploader is None or strategy == file_selection.END:
            return
        starts = args.hub_always_push or not self._uploader.is_busy
        if starts:
            announce()
        self._uploader.push_checkpoint(
            folder,
            strategy=strategy,
            message=file_selection.message(args, state),
            step=state.global_step,
            when_there=when_there,
            starts=starts,
        )
        self.in_progress = self._uploader.progress

    def finish(self, *, unless: Callable[[], bool]) -> None:
        """Waits for the upload that is under way, then sends those that failed or were put off."""
        if self._uploader is not None:
            self._uploader.finish(unless=unless)


def result_of(job: Future[Any], *, raises: bool) -> Any:
    """Returns what a job gives when it is done; None where its error is not to be raised, and was logged already."""
    error = job.exception()
    if error is not None and not raises:
        return None
    return job.result()
