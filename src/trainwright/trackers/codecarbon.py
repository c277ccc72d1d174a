"""CodeCarbon: what a training emits. It measures for itself and takes no values; each machine measures its own."""

from __future__ import annotations

from typing import Any

from trainwright.trackers.base import TrackerCallback, missing


class CodeCarbonCallback(TrackerCallback):
    """Writes emissions.csv into the output directory when training ends."""

    name = "codecarbon"

    def __init__(self) -> None:
        super().__init__()
        try:
            import codecarbon
        except ImportError as error:
            raise missing("codecarbon", "codecarbon") from error
        self._codecarbon: Any = codecarbon
        self.tracker: Any = None

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        self.tracker = self._codecarbon.EmissionsTracker(output_dir=str(args.output_dir))
        self.tracker.start()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes no values."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes no values."""

    def close(self, args: Any, state: Any, **kwargs: Any) -> None:
        self.tracker.stop()
        self._initialized = False
