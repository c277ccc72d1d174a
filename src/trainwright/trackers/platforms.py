"""Trackers of the place that runs this process: Azure ML, CodeCarbon (emissions), Flyte, Kubeflow."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

from trainwright.config.plans import OPEN_END
from trainwright.config.protocol import Arguments
from trainwright.distributed.world import runs_in_kubeflow
from trainwright.errors import MissingPackageError
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import Client, TrackerCallback, logger, needs, numbers

PAUSE_S = 5.0  # between two posts to Kubeflow
TIMEOUT_S = 5


class KubeflowCallback(TrackerCallback):
    """The controller sets KUBEFLOW_TRAINER_SERVER_URL, _CA_CERT and _TOKEN (paths of the latter two)."""

    name = "kubeflow"

    def __init__(self) -> None:
        super().__init__()
        if not runs_in_kubeflow():
            raise MissingPackageError(
                "report_to='kubeflow' works inside of a TrainJob, whose controller sets KUBEFLOW_TRAINER_SERVER_URL."
            )
        self._metrics: dict[str, object] = {}
        self._start = time.monotonic()
        self._first_step = 0
        self._last_post = -PAUSE_S

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self._start, self._first_step = time.monotonic(), state.global_step
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
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
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


class AzureMLCallback(TrackerCallback):
    """Reports to a run of Azure ML.

    Args:
        azureml_run: an `azureml.core.run.Run`; by default the run of this process.
    """

    name = "azure_ml"

    def __init__(self, azureml_run: Client = None) -> None:
        super().__init__()
        with needs("azure_ml", "azureml-sdk"):
            from azureml.core.run import Run
        self._run_class: Client = Run
        self.azureml_run = azureml_run

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self.azureml_run is None:
            self.azureml_run = self._run_class.get_context()

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        for name, value in numbers(values).items():
            self.azureml_run.log(name, value, description=name)


class CodeCarbonCallback(TrackerCallback):
    """Writes emissions.csv into the output directory when training ends."""

    name, takes_values = "codecarbon", False

    def __init__(self) -> None:
        super().__init__()
        with needs("codecarbon", "codecarbon"):
            import codecarbon
        self._codecarbon: Client = codecarbon
        self.tracker: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self.tracker = self._codecarbon.EmissionsTracker(output_dir=str(args.output_dir))
        self.tracker.start()

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        self.tracker.stop()
        self._initialized = False


class FlyteCallback(TrackerCallback):
    """Passes each checkpoint to the task, so that a retried task can resume.

    Args:
        save_log_history: show the log as a deck; needs flytekitplugins-deck-standard and pandas.
        sync_checkpoints: pass checkpoints to the task.
    """

    name, takes_values = "flyte", False  # `close` shows the whole log

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        with needs("flyte", "flytekit"):
            import flytekit
        self._flytekit: Client = flytekit
        self.cp: Client = flytekit.current_context().checkpoint
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
