"""Azure ML: metrics of the run that the service started this process in."""

from __future__ import annotations

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, TrackerCallback, needs


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
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.azureml_run.log(name, value, description=name)
