"""Calls of huggingface_hub that a training needs, without knowledge of the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

MAIN = (None, "main")
TIMEOUT_S = 10.0


class HubClient:
    """Repositories and commits, with a token of the caller's or that of the login."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def make_repo(self, name: str, *, private: bool | None = None, revision: str | None = None) -> str:
        """Makes the repository, and the branch if one is named, unless they are there; returns its full name."""
        from huggingface_hub import HfApi

        api = HfApi(library_name="trainwright")
        repo = str(api.create_repo(name, token=self.token, private=private, exist_ok=True).repo_id)
        if revision not in MAIN and not str(revision).startswith("refs/"):
            api.create_branch(repo, branch=str(revision), token=self.token, exist_ok=True)
        return repo

    def upload_folder(
        self, repo: str, folder: Path, *, message: str, path: str = "", revision: str | None = None,
        ignored: Sequence[str] = (),
    ) -> object:  # fmt: skip
        """Uploads a directory as one commit: all of its files become visible, or none does.

        It ends in `HfApi.upload_folder` as transformers does, where libraries and tests wrap it.

        Args:
            repo: full name of the repository.
            folder: local directory.
            message: of the commit.
            path: directory in the repository; default its root.
            revision: branch; None for the main one.
            ignored: patterns of files that stay.

        Returns:
            What the Hub says of the commit.
        """
        from huggingface_hub import HfApi

        return HfApi(library_name="trainwright").upload_folder(
            repo_id=repo, folder_path=str(folder), path_in_repo=path or None, commit_message=message, token=self.token,
            ignore_patterns=list(ignored) or None, revision=revision,
        )  # fmt: skip

    def license_of(self, repo: str) -> str | None:
        """Returns the license that a model's repository names; None where it names none or cannot be asked."""
        from huggingface_hub import HfApi

        try:
            tags = HfApi(library_name="trainwright").model_info(repo, token=self.token, timeout=TIMEOUT_S).tags or []
        except Exception as error:  # whatever the client raises: a card does without
            logger.info("The license of %s is not known: %s", repo, error)
            return None
        return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def is_permanent_error(error: BaseException) -> bool:
    """Returns True if a retry is useless: the service refused, or the name is invalid."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 500)
        return 400 <= status < 500 and status not in (408, 409, 412, 425, 429)
    return isinstance(error, ValueError)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides the client's progress bars, which would be drawn over the training's."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
