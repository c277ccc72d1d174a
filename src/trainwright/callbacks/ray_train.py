"""RayTrainReport: reports every save to Ray Train, with the metrics so far and the checkpoint."""

from __future__ import annotations

from pathlib import Path

from trainwright._types import PREFIX_CHECKPOINT_DIR
from trainwright.callbacks.base import TrainerCallback
from trainwright.config.coerce import output_path
from trainwright.config.protocol import Arguments
from trainwright.errors import needs_package
from trainwright.state.trainer_state import TrainerControl, TrainerState


class RayTrainReport(TrainerCallback):
    """For a trainer inside the `train_loop_per_worker` of Ray's `TorchTrainer`; ray must be installed.

    Ray copies the checkpoint to its own storage, so `output_dir` may be a folder of the worker. All workers report; the
    checkpoint comes from the main process.
    """

    def __init__(self) -> None:
        with needs_package("RayTrainReport needs Ray Train: pip install 'ray[train]'"):
            import ray.train
        self._ray = ray.train

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        folder = Path(output_path(args)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        reports = state.is_world_process_zero and folder.is_dir()
        checkpoint = self._ray.Checkpoint.from_directory(str(folder)) if reports else None
        self._ray.report({**metrics, "step": state.global_step}, checkpoint=checkpoint)
