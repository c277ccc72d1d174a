"""Trackers for services that need only a few calls: ClearML, Comet, DVCLive, Neptune, SwanLab, TensorBoard, Trackio."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.journal.record import flat
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers import base
from trainwright.trackers.base import (
    TRACKERS_OF_TRANSFORMERS,
    Client,
    TrackerCallback,
    client,
    collect_settings,
    is_set,
    numbers,
    rewrite_logs,
)


class ClearMLCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Continues the current task, else opens one: variables CLEARML_PROJECT, CLEARML_TASK, CLEARML_LOG_MODEL."""

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        self._clearml = client("clearml", "clearml")
        self._clearml_task: Client = None
        self._is_own = False

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self._clearml_task = self._clearml.Task.current_task()
        if self._clearml_task is None:
            self._is_own = True
            self._clearml_task = self._clearml.Task.init(
                project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
                task_name=state.trial_name or os.environ.get("CLEARML_TASK", "Trainer"),
                auto_connect_frameworks={"tensorboard": False, "pytorch": False},
                continue_last_task=self._handle or False,
            )
            self.remember(args, self._clearml_task.id)
        self._clearml_task.connect(args.to_dict(), "Transformers")
        if config := base.read_model_config(model):
            self._clearml_task.set_configuration_object(name="Model Configuration", config_dict=config)

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        board = self._clearml_task.get_logger()
        for name, value in numbers(values).items():
            if name in (*base.ENDS, "epoch"):
                board.report_single_value(name=name, value=value)
            else:
                title, _, series = next(iter(rewrite_logs({name: value}))).partition("/")
                board.report_scalar(title=title, series=series, value=value, iteration=state.global_step)

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if is_set("CLEARML_LOG_MODEL"):
            model = self._clearml.OutputModel(task=self._clearml_task, name=folder.name)
            model.update_weights_package(
                weights_path=str(folder),
                target_filename=folder.name,
                auto_delete_file=False,
                iteration=state.global_step,
            )

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._is_own:
            self._clearml_task.close()
            self._initialized = False


def is_comet_configured() -> bool:
    """Returns True if Comet's client finds a key, in its environment or its configuration file."""
    try:
        import comet_ml

        return bool(comet_ml.config.get_config("comet.api_key"))
    except Exception as error:
        base.logger.debug("Comet's configuration cannot be read: %s", error)
        return False


class CometCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Logs to Comet.

    Variables: COMET_MODE (get, create, get_or_create), COMET_START_ONLINE, COMET_PROJECT_NAME, COMET_EXPERIMENT_KEY;
    COMET_LOG_ASSETS uploads the output directory when training ends.
    """

    name = "comet_ml"

    def __init__(self) -> None:
        super().__init__()
        self._comet = client("comet_ml", "comet_ml", "comet-ml")
        self._experiment: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        mode = (os.environ.get("COMET_MODE") or "").lower() or None
        if mode not in (None, "get", "get_or_create", "create"):
            raise ArgumentError(f"COMET_MODE={mode!r}; choose of get, get_or_create, create.")
        mode = "create" if state.is_hyper_param_search else mode
        known = {} if self._handle is None or state.is_hyper_param_search else {"experiment_key": self._handle}
        self._experiment = self._comet.start(
            mode=mode, experiment_config=self._comet.ExperimentConfig(name=args.run_name), **known
        )
        # It stays open for later logs. At the end of the process the client closes only objects that were opened
        # in the main thread: of an offline experiment that was opened here nothing would be kept.
        atexit.register(self._experiment.end)
        self.remember(args, self._experiment.get_key())
        self._experiment.log_parameters(flat({"args": args.to_dict(), "config": base.read_model_config(model)}))
        if state.is_hyper_param_search:
            self._experiment.log_optimization(optimization_id=state.trial_name, parameters=state.trial_params)

    @property
    def loses_what_it_took(self) -> bool:
        """Returns True if the experiment is offline: it becomes a file when it ends."""
        return "Offline" in type(self._experiment).__name__

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        self._experiment.log_metrics(rewrite_logs(values), step=state.global_step, epoch=state.epoch)

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self.send(metrics, state)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if is_set("COMET_LOG_ASSETS"):
            self._experiment.log_asset_folder(
                output_path(args), recursive=True, log_file_name=True, step=state.global_step
            )
        self._experiment.flush()
        if state.is_hyper_param_search:
            self._experiment.end()
            self._initialized = False


class DVCLiveCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Reports to `live`, or to a new Live.

    Args:
        live: a dvclive.Live to report to; by default, a new one.
        log_model: True: the last checkpoint is logged when training ends; "all": the output directory at each one;
            None: as the variable HF_DVCLIVE_LOG_MODEL says.
        **kwargs: arguments of dvclive.Live.
    """

    name = "dvclive"

    def __init__(self, live: Client = None, log_model: bool | str | None = None, **kwargs: object) -> None:
        super().__init__()
        self._dvclive = client("dvclive", "dvclive")
        self._given = kwargs
        self.live = live
        if log_model is None:
            log_model = "all" if os.environ.get("HF_DVCLIVE_LOG_MODEL") == "all" else is_set("HF_DVCLIVE_LOG_MODEL")
        self._log_model = log_model

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self.live is None:
            self.live = self._dvclive.Live(**{**({"resume": True} if state.global_step else {}), **self._given})
        self.live.log_params(args.to_dict())

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        from dvclive.utils import standardize_metric_name

        self.live.step = state.global_step
        for name, value in numbers(values).items():
            self.live.log_metric(standardize_metric_name(name, "dvclive.huggingface"), value)
        self.live.make_summary()

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self._log_model == "all":
            self.live.log_artifact(output_path(args))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        last = Path(output_path(args)) / f"checkpoint-{state.global_step}"
        if self._log_model is True and last.is_dir():
            name = "best" if args.load_best_model_at_end else "last"
            folder = state.best_model_checkpoint if args.load_best_model_at_end else last
            self.live.log_artifact(str(folder), name=name, type="model", copy=True)
        self.live.end()


class NeptuneCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Reports to `run`, or to a new run.

    Args:
        api_token, project: of the service; by default of its environment variables.
        name: of the run.
        base_namespace: root of all that is reported.
        run: an open run to report to.
        log_parameters: report arguments and the model's configuration.
        log_checkpoints: upload checkpoints: "same" (each), "last", "best"; None: none.
        neptune_run_kwargs: further arguments of `neptune.init_run`.
    """

    name = "neptune"
    flat_metrics = ("train/epoch",)

    def __init__(
        self,
        *,
        api_token: str | None = None,
        project: str | None = None,
        name: str | None = None,
        base_namespace: str = "finetuning",
        run: Client = None,
        log_parameters: bool = True,
        log_checkpoints: str | None = None,
        **neptune_run_kwargs: object,
    ) -> None:
        super().__init__()
        self._neptune = client("neptune", "neptune")
        if log_checkpoints not in (None, "same", "last", "best"):
            raise ArgumentError(f"log_checkpoints={log_checkpoints!r}; choose of None, same, last, best.")
        self._run = run
        self._is_own = run is None
        self._base = base_namespace
        self._log_parameters = log_parameters
        self._log_checkpoints = log_checkpoints
        self._given = {"api_token": api_token, "project": project, "name": name, **neptune_run_kwargs}

    @property
    def run(self) -> Client:
        """The run at the service, once it is open."""
        self._guard.flush()
        return self._run

    @classmethod
    def get_run(cls, trainer: Any) -> Client:  # a Trainer, which is above the trackers
        """Returns the run that a trainer reports to.

        Raises:
            ArgumentError: the trainer has no NeptuneCallback.
        """
        callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, cls)), None)
        if callback is None:
            raise ArgumentError("This trainer has no NeptuneCallback; pass report_to='neptune'.")
        return callback.run

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self._run is None:
            known = {} if self._handle is None else {"with_id": self._handle}
            self._run = self._neptune.init_run(**{**self._given, **known})
        self.remember(args, str(self._run["sys/id"].fetch()))
        root = self._run[self._base]
        if self._log_parameters:
            root["trainer_parameters"] = self._neptune.utils.stringify_unsupported(args.to_sanitized_dict())
            if config := base.read_model_config(model):
                root["model_parameters"] = self._neptune.utils.stringify_unsupported(config)
        if state.is_hyper_param_search:
            root["trial"] = state.trial_name
            root["trial_params"] = state.trial_params

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        root = self._run[self._base]
        for name, value in rewrite_logs(values).items():
            if name in self.flat_metrics:
                root[name] = value
            elif isinstance(value, (int, float)):
                root[name].append(value, step=state.global_step)

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        kind = self._log_checkpoints
        if kind is None or (kind == "best" and state.best_global_step != state.global_step):
            return
        target = "checkpoints" if kind == "same" else f"checkpoints/{kind}"
        self._run[self._base][target].upload_files(str(folder))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._is_own:
            self._run.stop()
            self._run = None
            self._initialized = False


class SwanLabCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Variables: SWANLAB_PROJECT, SWANLAB_MODE, SWANLAB_LOG_DIR, SWANLAB_RUN_ID, SWANLAB_RESUME."""

    name = "swanlab"

    def __init__(self) -> None:
        super().__init__()
        self._swanlab = client("swanlab", "swanlab")

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self._swanlab.get_run() is None:
            names = [name for name in (args.run_name, state.trial_name) if name is not None]
            known: dict[str, str] = {"experiment_name": "-".join(names)} if names else {}
            if "SWANLAB_RUN_ID" in os.environ:
                known["id"] = os.environ["SWANLAB_RUN_ID"]
            elif self._handle is not None:
                known["id"] = self._handle
            if "SWANLAB_RESUME" in os.environ or state.global_step:
                known["resume"] = os.environ.get("SWANLAB_RESUME", "allow")
            run = self._swanlab.init(project=os.environ.get("SWANLAB_PROJECT"), **known)
            if getattr(run, "id", None) is not None:
                self.remember(args, str(run.id))
        settings = collect_settings(args, model)
        if hasattr(model, "num_parameters"):
            settings["model_num_parameters"] = model.num_parameters()
        self._swanlab.config.update(settings)

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        step = state.global_step
        single = {f"single_value/{name}": values[name] for name in base.ENDS if name in values}
        curves = rewrite_logs({name: value for name, value in values.items() if name not in base.ENDS})
        self._swanlab.log({**single, **curves, "train/global_step": step}, step=step)

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._swanlab.log(rewrite_logs(metrics))


class TensorBoardCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Writes scalars and texts. A resumed run continues in its directory and hides later events of the killed one.

    Args:
        tb_writer: a SummaryWriter to use; by default, a new one.

    The variable TENSORBOARD_LOGGING_DIR names the directory where `logging_dir` does not.
    """

    name = "tensorboard"

    def __init__(self, tb_writer: Client = None) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer_class: Client = client("tensorboard", "tensorboardX", "tensorboard").SummaryWriter
        else:
            self._writer_class = SummaryWriter
        self._is_own = tb_writer is None
        self.tb_writer = tb_writer
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = None if folder is None else os.path.expanduser(folder)

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        # As torch names it.
        default = os.path.join(output_path(args), "runs", f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}")
        if state.is_hyper_param_search and state.trial_name is not None:
            self.logging_dir = os.path.join(default, state.trial_name)
        if self.logging_dir is None:
            self.logging_dir = get_value(args, "logging_dir")
        if self.logging_dir is None:
            self.logging_dir = self._handle or default
        if self.tb_writer is None:
            superseded = {"purge_step": state.global_step + 1} if state.global_step else {}
            self.tb_writer = self._writer_class(log_dir=self.logging_dir, **superseded)
            self.remember(args, self.logging_dir)
        self.tb_writer.add_text("args", args.to_json_string())
        config: Client = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.tb_writer.add_text("model_config", config.to_json_string())

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        for name, value in rewrite_logs(values).items():
            if isinstance(value, (int, float)):
                self.tb_writer.add_scalar(name, value, state.global_step)
            elif isinstance(value, str):
                self.tb_writer.add_text(name, value, state.global_step)
            else:
                base.logger.warning("TensorBoard cannot show a %s; %s is not sent.", type(value).__name__, name)
        self.tb_writer.flush()

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        self.tb_writer.close()
        if self._is_own:
            self.tb_writer = None
            self._initialized = False


class TrackioCallback(TrackerCallback, original=TRACKERS_OF_TRANSFORMERS):
    """Reports under `project` and `run_name`, to the Space and bucket that the `trackio_...` arguments name."""

    name = "trackio"

    def __init__(self) -> None:
        super().__init__()
        self._trackio = client("trackio", "trackio")
        self._space_id: str | None = None
        self._static_space_id: str | None = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        settings = collect_settings(args, model)
        if hasattr(model, "num_parameters"):
            settings["model/num_parameters"] = model.num_parameters()
        name = state.trial_name or args.run_name or self._handle
        self._trackio.init(
            project=args.project,
            name=name,
            space_id=args.trackio_space_id,
            resume="allow",
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            config=settings,
        )
        self._space_id = self._trackio.context_vars.current_space_id.get()
        run = self._trackio.context_vars.current_run.get()
        if getattr(run, "name", None):
            self.remember(args, run.name)

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        curves = {name: value for name, value in values.items() if name not in base.ENDS}
        self._trackio.log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._trackio.log(rewrite_logs(metrics))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        try:
            self._trackio.finish()
        finally:
            self._initialized = False
        if self._space_id is not None and args.trackio_static_space_id is not False:
            self._static_space_id = self._trackio.freeze(
                space_id=self._space_id,
                project=args.project,
                new_space_id=self._static_name(args),
                private=args.hub_private_repo,
            )
            tag(kwargs.get("model"), self._static_space_id or self._space_id)

    def on_push_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        is_wanted = self._space_id is None and args.trackio_static_space_id is not False
        if state.is_world_process_zero and self._initialized and is_wanted:
            model = kwargs.get("model")
            self._guard.submit(lambda: self._publish(args, model))

    def _publish(self, args: Arguments, model: object) -> None:
        self._static_space_id = self._trackio.sync(
            project=args.project,
            sdk="static",
            space_id=self._static_name(args),
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            force=True,
        )
        tag(model, self._static_space_id)

    def _static_name(self, args: Arguments) -> str:
        """Returns the name of the static Space; a valid, unused one is the project's name with a random suffix."""
        safe = re.sub(r"-+", "-", re.sub(r"[^a-z0-9._-]", "-", args.project.strip().lower())).strip("-_.")
        new = f"{(safe or 'trackio-project')[:81].rstrip('-')}-static-{secrets.token_hex(3)}"
        return self._static_space_id or args.trackio_static_space_id or new


def tag(model: object, space_id: str | None) -> None:
    """Adds the Space of a training to the model's tags, which the model card copies."""
    if model is None or space_id is None:
        return
    before = [t for t in getattr(model, "model_tags", None) or [] if not str(t).startswith("trackio:https://")]
    marks = ["trackio", f"trackio:https://huggingface.co/spaces/{space_id}"]
    tags = before + [mark for mark in marks if mark not in before]
    setattr(model, "model_tags", tags)  # noqa: B010 -- an attribute of transformers' models
