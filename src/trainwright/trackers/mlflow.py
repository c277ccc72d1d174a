"""MLflow: a run of a tracking server or a local store, through its client with the run's id; and DagsHub's server.

The client is used, not the functions of "the active run": the active run belongs to another thread.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.journal.record import flat
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import Client, TrackerCallback, is_set, logger, needs, numbers, settings_of

NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_\-. :/]")
PER_CALL = 100  # parameters that a server takes at a time
LONGEST_VALUE = 6000


class MLflowCallback(TrackerCallback):
    """Continues the run that is active where training starts, or that of a resumed training, else opens one.

    Variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON), MLFLOW_NESTED_RUN,
    MLFLOW_FLATTEN_PARAMS, MLFLOW_MAX_LOG_PARAMS, HF_MLFLOW_LOG_ARTIFACTS (uploads each checkpoint).
    """

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        with needs("mlflow", "mlflow"):
            import mlflow
        self._ml_flow: Client = mlflow
        self._client: Client = None
        self._run_id: str | None = None
        self._active: str | None = None  # the user's own run, in the thread that trains
        self._auto_end_run = False

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        active = self._ml_flow.active_run()
        self._active = None if active is None else active.info.run_id
        super().on_train_begin(args, state, control, **kwargs)

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self._client = self._ml_flow.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"))
        is_nested = is_set("MLFLOW_NESTED_RUN")
        given = os.environ.get("MLFLOW_RUN_ID") or (None if is_nested else self._active) or self._handle
        self._run_id = given or self._new_run(args, parent=self._active if is_nested else None)
        self._auto_end_run = self._run_id != self._active
        if self._auto_end_run and given is not None:
            self._client.set_terminated(self._run_id, status="RUNNING")
        self.remember(args, self._run_id)
        if given is None or given == self._active:
            self._describe(args, model)
        for name, value in json.loads(os.environ.get("MLFLOW_TAGS") or "{}").items():
            self._client.set_tag(self._run_id, name, value)

    def _new_run(self, args: Arguments, *, parent: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        tags = {} if parent is None else {"mlflow.parentRunId": parent}
        return str(self._client.create_run(number, run_name=args.run_name, tags=tags).info.run_id)

    def _describe(self, args: Arguments, model: object) -> None:
        settings = settings_of(args, model)
        settings = flat(settings) if is_set("MLFLOW_FLATTEN_PARAMS") else settings
        short = {name: value for name, value in settings.items() if len(str(value)) <= LONGEST_VALUE}
        if len(short) < len(settings):
            logger.warning("Too long for MLflow, and left out: %s.", ", ".join(sorted(set(settings) - set(short))))
        params = [self._ml_flow.entities.Param(name, str(value)) for name, value in short.items()]
        limit = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        params = params[: int(limit)] if limit.isdigit() else params
        for start in range(0, len(params), PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PER_CALL])

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._ml_flow.entities.Metric(NOT_IN_NAMES.sub("_", name), value, now, state.global_step)
            for name, value in numbers(values).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if is_set("HF_MLFLOW_LOG_ARTIFACTS"):
            self._client.log_artifacts(self._run_id, str(folder), artifact_path=folder.name)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._auto_end_run:
            self._client.set_terminated(self._run_id)
        self._handle = self._run_id  # what is logged after the training belongs to it too
        self._initialized = False


class DagsHubCallback(MLflowCallback):
    """MLFLOW_TRACKING_URI names the repository (`dagshub.init()` sets it), BRANCH the branch to upload to;
    HF_DAGSHUB_LOG_ARTIFACTS uploads what the training wrote, when it ends.
    """

    name = "dagshub"

    def __init__(self) -> None:
        super().__init__()
        with needs("dagshub", "dagshub"):
            from dagshub.upload import Repo
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
