"""CodeCarbon: emissions of a training. Its tracker measures on each machine and takes no logged values."""

from __future__ import annotations

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import Client, TrackerCallback, needs


class CodeCarbonCallback(TrackerCallback):
    """Writes emissions.csv into the output directory when training ends."""

    name = "codecarbon"

    def __init__(self) -> None:
        super().__init__()
        with needs("codecarbon", "codecarbon"):
            import codecarbon
        self._codecarbon: Client = codecarbon
        self.tracker: Client = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self.tracker = self._codecarbon.EmissionsTracker(output_dir=str(args.output_dir))
        self.tracker.start()

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Does nothing."""

    def on_predict(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Does nothing."""

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        self.tracker.stop()
        self._initialized = False
