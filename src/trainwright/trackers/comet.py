"""Comet: an experiment, online or offline as its client is configured."""

from __future__ import annotations

import atexit
import logging
import os

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, TrackerCallback, config_of, needs, rewrite_logs
from trainwright.trackers.mlflow import flat, is_set

logger = logging.getLogger(__name__)
MODES = ("get", "get_or_create", "create")


def is_configured() -> bool:
    """Returns True if the client finds a key, in its environment or its configuration file."""
    try:
        import comet_ml

        return bool(comet_ml.config.get_config("comet.api_key"))
    except Exception as error:
        logger.debug("Comet's configuration cannot be read: %s", error)
        return False


class CometCallback(TrackerCallback):
    """Variables: COMET_MODE (get, create, get_or_create), COMET_START_ONLINE, COMET_PROJECT_NAME, COMET_EXPERIMENT_KEY;
    COMET_LOG_ASSETS uploads the output directory when training ends.
    """

    name = "comet_ml"

    def __init__(self) -> None:
        super().__init__()
        with needs("comet_ml", "comet-ml"):
            import comet_ml
        self._comet: Client = comet_ml
        self._experiment: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        mode = (os.environ.get("COMET_MODE") or "").lower() or None
        if mode not in (None, *MODES):
            raise ArgumentError(f"COMET_MODE={mode!r}; choose of {', '.join(MODES)}.")
        mode = "create" if state.is_hyper_param_search else mode
        known = {} if self._handle is None or state.is_hyper_param_search else {"experiment_key": self._handle}
        self._experiment = self._comet.start(
            mode=mode, experiment_config=self._comet.ExperimentConfig(name=args.run_name), **known
        )
        # It stays open for later logs. At the end of the process the client closes only what was opened
        # in the main thread: of an offline experiment that was opened here nothing would be kept.
        atexit.register(self._experiment.end)
        self.remember(args, self._experiment.get_key())
        self._experiment.log_parameters(flat({"args": args.to_dict(), "config": config_of(model)}))
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
            self._experiment.log_asset_folder(args.output_dir, recursive=True, log_file_name=True,
                                              step=state.global_step)  # fmt: skip
        self._experiment.flush()
        if state.is_hyper_param_search:
            self._experiment.end()
            self._initialized = False
