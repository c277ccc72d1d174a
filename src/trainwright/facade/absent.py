"""Published names that this version does not carry out yet; each says so, and what to do meanwhile."""

from __future__ import annotations

from typing import Any, NoReturn

from trainwright.errors import NotYetError


class AbsentHooks:
    """The Hub."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        _not_yet("init_hf_repo", "Create the repository with huggingface_hub.create_repo.")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _not_yet("push_to_hub", "Call save_model(), then huggingface_hub.upload_folder.")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        _not_yet("push_to_hub", "Upload the checkpoint with huggingface_hub.upload_folder.")

    def _finish_current_push(self) -> None:
        """Waits for an upload that is under way; there is none."""


def _not_yet(name: str, instead: str) -> NoReturn:
    raise NotYetError(f"{name} is not in this version of Trainwright. {instead}")
