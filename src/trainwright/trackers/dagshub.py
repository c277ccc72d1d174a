"""DagsHub: MLflow at the server of a repository there; by option the output directory goes into the repository."""

from __future__ import annotations

import os

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, missing
from trainwright.trackers.mlflow import MLflowCallback, is_set


class DagsHubCallback(MLflowCallback):
    """MLFLOW_TRACKING_URI names the repository (`dagshub.init()` sets it), BRANCH the branch to upload to;
    HF_DAGSHUB_LOG_ARTIFACTS uploads what the training wrote, when it ends.
    """

    name = "dagshub"

    def __init__(self) -> None:
        super().__init__()
        try:
            from dagshub.upload import Repo
        except ImportError as error:
            raise missing("dagshub", "dagshub") from error
        self.Repo: Client = Repo
        self.repo: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            raise ArgumentError("report_to='dagshub' needs MLFLOW_TRACKING_URI; dagshub.init() sets it.")
        owner, _, name = address.removesuffix("/").rpartition("/")
        owner = owner.rpartition("/")[2]
        self.repo = self.Repo(owner=owner, name=name.split(".")[0], branch=os.environ.get("BRANCH") or "main")
        super().setup(args, state, model, **kwargs)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if is_set("HF_DAGSHUB_LOG_ARTIFACTS"):
            self.repo.directory("artifacts").add_dir(args.output_dir)
        super().close(args, state, **kwargs)
