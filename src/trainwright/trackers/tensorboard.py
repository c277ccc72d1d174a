"""TensorBoard: event files, in `logging_dir` or under the output directory."""

from __future__ import annotations

import os
import socket
from datetime import datetime

from trainwright.config.fields import value_of
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, TrackerCallback, logger, needs, rewrite_logs


def default_logdir() -> str:
    """Returns `runs/<time>_<host>`, as torch names it."""
    return os.path.join("runs", f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}")


class TensorBoardCallback(TrackerCallback):
    """Writes scalars and texts. A resumed run continues in its directory and hides later events of the killed one.

    Args:
        tb_writer: a SummaryWriter to use; by default one is made.

    The variable TENSORBOARD_LOGGING_DIR names the directory where `logging_dir` does not.
    """

    name = "tensorboard"

    def __init__(self, tb_writer: Client = None) -> None:
        super().__init__()
        self._writer_class = _summary_writer()
        self._is_own = tb_writer is None
        self.tb_writer = tb_writer
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = None if folder is None else os.path.expanduser(folder)

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if state.is_hyper_param_search and state.trial_name is not None:
            self.logging_dir = os.path.join(args.output_dir, default_logdir(), state.trial_name)
        if self.logging_dir is None:
            self.logging_dir = value_of(args, "logging_dir")
        if self.logging_dir is None:
            self.logging_dir = self._handle or os.path.join(args.output_dir, default_logdir())
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
                logger.warning("TensorBoard shows no %s; %s is left out.", type(value).__name__, name)
        self.tb_writer.flush()

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        self.tb_writer.close()
        if self._is_own:
            self.tb_writer, self._initialized = None, False


def _summary_writer() -> Client:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        with needs("tensorboard", "tensorboard"):
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
    return SummaryWriter
