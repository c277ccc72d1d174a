"""Trackers of platforms: Weights & Biases, MLflow and DagsHub; Azure ML, CodeCarbon (emissions), Flyte, Kubeflow.

MLflow is used by its client, not by the functions of "the active run": the active run belongs to another thread.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from trainwright.config.coerce import output_path
from trainwright.config.plans import OPEN_END
from trainwright.config.protocol import Arguments
from trainwright.distributed.world import runs_in_kubeflow
from trainwright.errors import ArgumentError, MissingPackageError
from trainwright.journal.record import flat
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.door import parse_json
from trainwright.trackers import base
from trainwright.trackers.base import (
    TRACKERS_OF_TRANSFORMERS,
    Client,
    TrackerCallback,
    client,
    collect_settings,
    is_set,
    logger,
    numbers,
    rewrite_logs,
)

PAUSE_S = 5.0  # between two posts to Kubeflow
TIMEOUT_S = 5
# MLflow
NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_\-. :/]")
PER_CALL = 100  # parameters that a server takes at a time
LONGEST_VALUE = 6000


class WandbCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Logs to Weights & Biases; a resumed run continues under its id.

    Variables: WANDB_PROJECT names the project, WANDB_LOG_MODEL uploads models ("checkpoint": each one saved, "end": the
    last), WANDB_WATCH logs "gradients", "parameters" or "all".
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        self._wandb = client("wandb", "wandb")
        self._run: Client = None
        self._log_model = os.environ.get("WANDB_LOG_MODEL", "false").lower()
        if self._log_model not in ("checkpoint", "end", "false"):
            raise ArgumentError(f"WANDB_LOG_MODEL={self._log_model!r}; choose of checkpoint, end, false.")

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        model = kwargs.get("model")
        super().on_train_begin(args, state, control, **kwargs)
        kind = os.environ.get("WANDB_WATCH", "false")
        # Hooks on the model are put there by the thread that trains it, which therefore waits for the run to open.
        is_wanted = state.is_world_process_zero and kind in ("gradients", "parameters", "all")
        if is_wanted and self._guard.flush() and self._initialized:
            self._wandb.watch(model, log=kind, log_freq=max(100, int(state.logging_steps)))

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if state.is_hyper_param_search:
            self._wandb.finish()
        self._run = self._wandb.run
        if self._run is None:
            project = os.environ.get("WANDB_PROJECT") or args.project or "huggingface"
            self._run = self._wandb.init(project=project, **self._names(args, state))
            self.remember(args, self._run.id)
        self._run.config.update(collect_settings(args, model), allow_val_change=True)
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        if hasattr(model, "num_parameters"):
            self._run.config.update({"model/num_parameters": model.num_parameters()}, allow_val_change=True)

    def _names(self, args: Arguments, state: TrainerState) -> dict[str, str]:
        if state.trial_name is not None:
            return {"name": state.trial_name, "group": args.run_name or args.output_dir}
        names = {} if args.run_name is None else {"name": args.run_name}
        if self._handle is not None and "WANDB_RUN_ID" not in os.environ:
            names |= {"id": self._handle, "resume": "allow"}
        return names

    @property
    def loses_what_it_took(self) -> bool:
        """Returns True if the run is offline: another process writes its file, and ends with ours if not waited for."""
        return bool(getattr(self._run, "offline", False))

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        for name in base.ENDS:
            if name in values:
                self._run.summary[name] = values[name]
        curves = {name: value for name, value in values.items() if name not in base.ENDS}
        self._run.log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._run.log(rewrite_logs(metrics))

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self._log_model == "checkpoint":
            aliases = [f"epoch_{round(state.epoch, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self._upload(folder, args, aliases)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._log_model == "end":
            best = state.best_model_checkpoint if args.load_best_model_at_end else None
            folder = Path(best or Path(output_path(args)) / f"checkpoint-{state.global_step}")
            if folder.is_dir():
                self._upload(folder, args, ["final_model"])
            else:
                logger.warning("WANDB_LOG_MODEL=end, but there is no checkpoint of the last step to upload.")

    def _upload(self, folder: Path, args: Arguments, aliases: list[str]) -> None:
        run = self._run
        has_name = args.run_name is not None and args.run_name != args.output_dir
        artifact = self._wandb.Artifact(name=f"model-{run.name if has_name else run.id}", type="model")
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=aliases)


class MLflowCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Continues the run that is active where training starts, or that of a resumed training, else opens one.

    Variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON), MLFLOW_NESTED_RUN,
    MLFLOW_FLATTEN_PARAMS, MLFLOW_MAX_LOG_PARAMS, HF_MLFLOW_LOG_ARTIFACTS (uploads each checkpoint).
    """

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        self._ml_flow = client("mlflow", "mlflow")
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
        for name, value in parse_json(os.environ.get("MLFLOW_TAGS") or "{}").items():
            self._client.set_tag(self._run_id, name, value)

    def _new_run(self, args: Arguments, *, parent: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        tags = {} if parent is None else {"mlflow.parentRunId": parent}
        return str(self._client.create_run(number, run_name=args.run_name, tags=tags).info.run_id)

    def _describe(self, args: Arguments, model: object) -> None:
        settings = collect_settings(args, model)
        settings = flat(settings) if is_set("MLFLOW_FLATTEN_PARAMS") else settings
        short = {name: value for name, value in settings.items() if len(str(value)) <= LONGEST_VALUE}
        if len(short) < len(settings):
            logger.warning("Too long for MLflow, not sent: %s.", ", ".join(sorted(set(settings) - set(short))))
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
        self._handle = self._run_id  # values logged after the training belong to it too
        self._initialized = False


class DagsHubCallback(MLflowCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Logs to DagsHub, by MLflow.

    Variables: MLFLOW_TRACKING_URI names the repository (`dagshub.init()` sets it), BRANCH the branch to upload to;
    HF_DAGSHUB_LOG_ARTIFACTS uploads the output directory at the end.
    """

    name = "dagshub"

    def __init__(self) -> None:
        super().__init__()
        self.Repo = client("dagshub", "dagshub.upload", "dagshub").Repo
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
            self.repo.directory("artifacts").add_dir(output_path(args))
        super().close(args, state, **kwargs)


class KubeflowCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """The controller sets KUBEFLOW_TRAINER_SERVER_URL, _CA_CERT and _TOKEN (paths of the latter two)."""

    name = "kubeflow"

    def __init__(self) -> None:
        super().__init__()
        if not runs_in_kubeflow():
            raise MissingPackageError(
                "report_to='kubeflow' works inside a TrainJob; its controller sets KUBEFLOW_TRAINER_SERVER_URL."
            )
        self._metrics: dict[str, object] = {}
        self._start = time.monotonic()
        self._first_step = 0
        self._last_post = -PAUSE_S

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self._start = time.monotonic()
        self._first_step = state.global_step
        self._post(state, percent=0)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        now = time.monotonic()
        if state.is_world_process_zero and now - self._last_post >= PAUSE_S:
            self._last_post = now
            percent, remaining = self._progress(state, now)
            self._guard.submit(lambda: self._post(state, percent=percent, remaining_s=remaining))

    def _progress(self, state: TrainerState, now: float) -> tuple[int, float | None]:
        """Percent done, at most 99 before the end, and seconds left at the speed since this process began."""
        done = state.global_step - self._first_step
        if state.max_steps == OPEN_END:
            return 0, None
        left = (now - self._start) / done * (state.max_steps - state.global_step) if done > 0 else None
        return min(99, int(100 * state.global_step / max(state.max_steps, 1))), left

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        self._metrics |= numbers(values)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        is_done = state.global_step >= state.max_steps
        self._post(state, percent=100 if is_done else self._progress(state, time.monotonic())[0], remaining_s=0)
        self._initialized = False

    def _post(self, state: TrainerState, *, percent: int, remaining_s: float | None = None) -> None:
        metrics = {**self._metrics, "current_step": state.global_step, "total_steps": state.max_steps}
        status: dict[str, object] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "progressPercentage": percent,
            "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
        }
        if remaining_s is not None:
            status["estimatedRemainingSeconds"] = max(0, int(remaining_s))
        token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text(encoding="utf-8").strip()
        request = urllib.request.Request(
            os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
            data=json.dumps({"trainerStatus": status}).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        authority = os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        context = ssl.create_default_context(cafile=authority) if authority else None
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
            pass


class AzureMLCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Reports to a run of Azure ML.

    Args:
        azureml_run: an `azureml.core.run.Run`; by default the run of this process.
    """

    name = "azure_ml"

    def __init__(self, azureml_run: Client = None) -> None:
        super().__init__()
        self._run_class = client("azure_ml", "azureml.core.run", "azureml-sdk").Run
        self.azureml_run = azureml_run

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self.azureml_run is None:
            self.azureml_run = self._run_class.get_context()

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        for name, value in numbers(values).items():
            self.azureml_run.log(name, value, description=name)


class CodeCarbonCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Writes emissions.csv into the output directory when training ends."""

    name = "codecarbon"
    takes_values = False

    def __init__(self) -> None:
        super().__init__()
        self._codecarbon = client("codecarbon", "codecarbon")
        self.tracker: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self.tracker = self._codecarbon.EmissionsTracker(output_dir=output_path(args))
        self.tracker.start()

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        self.tracker.stop()
        self._initialized = False


class FlyteCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Passes each checkpoint to the task, so that a retried task can resume.

    Args:
        save_log_history: show the log as a deck; needs flytekitplugins-deck-standard and pandas.
        sync_checkpoints: pass checkpoints to the task.
    """

    name = "flyte"
    takes_values = False  # `close` shows the whole log

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        self._flytekit = client("flyte", "flytekit")
        self.cp: Client = self._flytekit.current_context().checkpoint
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self.sync_checkpoints:
            self.cp.save(str(folder))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if not self.save_log_history:
            return
        try:
            import pandas as pd
            from flytekitplugins.deck.renderer import TableRenderer
        except ImportError:
            logger.warning("Flyte shows no log: pip install flytekitplugins-deck-standard pandas.")
            return
        self._flytekit.Deck("Log History", TableRenderer().to_html(pd.DataFrame(state.log_history)))
