"""Azure ML: metrics of the run that the service started this process in."""

from __future__ import annotations

from typing import Any

from trainwright.trackers.base import TrackerCallback, missing


class AzureMLCallback(TrackerCallback):
    """Reports to `azureml_run`, or to the run of this process."""

    name = "azure_ml"

    def __init__(self, azureml_run: Any = None) -> None:
        super().__init__()
        try:
            from azureml.core.run import Run
        except ImportError as error:
            raise missing("azure_ml", "azureml-sdk") from error
        self._run_class: Any = Run
        self.azureml_run = azureml_run

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if self.azureml_run is None:
            self.azureml_run = self._run_class.get_context()

    def send(self, values: dict[str, Any], state: Any) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.azureml_run.log(name, value, description=name)
