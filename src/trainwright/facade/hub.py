"""The hooks for the Hub: the repository, uploads on the way, the last one. What an upload is, is in `hub/`."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainwright import assemble
from trainwright.facade.report import ReportHooks
from trainwright.hub import file_selection

logger = logging.getLogger(__name__)


class HubHooks(ReportHooks):
    """Brings models and checkpoints to the Hub. Only the first process of all does."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository `hub_model_id`, unless it is there; by default named as the output directory.

        Args:
            token: with the right to write; default `args.hub_token`, else that of the login.
            private: of a new repository; default `args.hub_private_repo`.
        """
        if self.is_world_process_zero():
            self._uploader = assemble.make_uploader(self.args, self._journal, token=token, private=private)
            self.hub_model_id = self._uploader.open()
            self.push_in_progress = None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model to the output directory, writes its card, and uploads both with what else lies there.

        Args:
            commit_message: of the commit.
            blocking: return when the Hub has it; else at once.
            token: other than `args.hub_token`.
            revision: branch other than `args.hub_revision`.
            private: of a new repository.
            kwargs: for `create_model_card`.

        Returns:
            What the Hub says of the commit, with its address; a future of that with `blocking=False`.

        Raises:
            HfHubHTTPError, OSError: it failed; but in the middle of a training this is a warning, and it is tried
                again at the end.
        """
        self.callback_handler.fire("on_push_begin", self._run)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = kwargs.pop("model_name", None) or file_selection.repo_name(self.args).rpartition("/")[2]
        self.create_model_card(model_name=name, **kwargs)
        self._finish_current_push()
        job = self._push_root(commit_message, token=token, revision=revision)
        return assemble.result_of(job, raises=not self.is_in_train) if blocking else job

    def _push_root(self, message: str | None, *, token: str | None, revision: str | None) -> Future[Any]:
        assert self._uploader is not None
        other = None if token is None else assemble.hub_client(token)
        return self._uploader.push_root(
            message, client=other, revision=revision, holds=self.is_in_train, step=self.state.global_step
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads a checkpoint as `hub_strategy` says, behind training's back, one at a time.

        What is saved while another upload is under way waits for the end of the training, unless `hub_always_push`.
        """
        strategy = file_selection.strategy_of(self.args)
        if not self.is_world_process_zero() or strategy == file_selection.END or self._uploader is None:
            return
        starts = self.args.hub_always_push or not self._uploader.is_busy
        if starts:
            self.callback_handler.fire("on_push_begin", self._run)
        self._uploader.push_checkpoint(
            Path(checkpoint_folder),
            strategy=strategy,
            message=file_selection.message(self.args, self.state),
            step=self.state.global_step,
            when_there=self._writer.then,
            starts=starts,
        )
        self.push_in_progress = self._uploader.progress

    def _finish_current_push(self) -> None:
        """Waits for the upload that is under way, then makes up for those that failed or were put off."""
        if self._uploader is not None:
            self._uploader.finish(unless=lambda: self._run.is_interrupted)
