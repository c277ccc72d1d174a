"""Table of trackers: name, class, and probe of its package. A class is imported when a run reports to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainwright.distributed.world import runs_in_kubeflow
from trainwright.errors import ArgumentError

if TYPE_CHECKING:
    from trainwright.trackers.base import TrackerCallback


def _found(*packages: str) -> bool:
    try:
        return all(find_spec(package) is not None for package in packages)
    except (ImportError, ValueError):
        return False


is_azureml_available = partial(_found, "azureml", "azureml.core", "azureml.core.run")
is_clearml_available = partial(_found, "clearml")
is_codecarbon_available = partial(_found, "codecarbon")
is_dagshub_available = partial(_found, "dagshub", "mlflow")
is_dvclive_available = partial(_found, "dvclive")
is_flyte_deck_standard_available = partial(_found, "flytekit", "flytekitplugins.deck")
is_flytekit_available = partial(_found, "flytekit")
is_kubeflow_available = runs_in_kubeflow
is_neptune_available = partial(_found, "neptune")
is_swanlab_available = partial(_found, "swanlab")
is_trackio_available = partial(_found, "trackio")
is_wandb_available = partial(_found, "wandb")


def is_tensorboard_available() -> bool:
    """Returns True if a package that writes TensorBoard's files is installed."""
    return _found("tensorboard") or _found("tensorboardX")


def is_mlflow_available() -> bool:
    """Returns True if MLflow is installed and not switched off by DISABLE_MLFLOW_INTEGRATION."""
    return _found("mlflow") and os.environ.get("DISABLE_MLFLOW_INTEGRATION", "").upper() != "TRUE"


def is_comet_available() -> bool:
    """Returns True if Comet's client is installed and has an API key."""
    if not _found("comet_ml") or "COMET_API_KEY" in os.environ:
        return _found("comet_ml")
    from trainwright.trackers.services import is_comet_configured

    return is_comet_configured()


# Name for report_to -> module, class, and whether "all" reports to it now; in the order of "all".
TRACKERS: dict[str, tuple[str, str, Callable[[], bool]]] = {
    "azure_ml": ("platforms", "AzureMLCallback", lambda: is_azureml_available() and not is_mlflow_available()),
    "comet_ml": ("services", "CometCallback", is_comet_available),
    "dagshub": ("platforms", "DagsHubCallback", is_dagshub_available),
    "dvclive": ("services", "DVCLiveCallback", is_dvclive_available),
    "mlflow": ("platforms", "MLflowCallback", is_mlflow_available),
    "neptune": ("services", "NeptuneCallback", is_neptune_available),
    "tensorboard": ("services", "TensorBoardCallback", is_tensorboard_available),
    "wandb": ("platforms", "WandbCallback", is_wandb_available),
    "codecarbon": ("platforms", "CodeCarbonCallback", is_codecarbon_available),
    "clearml": ("services", "ClearMLCallback", is_clearml_available),
    "swanlab": ("services", "SwanLabCallback", is_swanlab_available),
    "trackio": ("services", "TrackioCallback", is_trackio_available),
    "kubeflow": ("platforms", "KubeflowCallback", is_kubeflow_available),
    "flyte": ("platforms", "FlyteCallback", bool),  # works only inside of its own tasks, so "all" leaves it out
}


def get_reporting_integration_callbacks(report_to: str | Sequence[str] | None) -> list[type[TrackerCallback]]:
    """Returns the classes of trackers.

    Args:
        report_to: one name, several names, "all" (every installed tracker), or "none".

    Returns:
        The classes, in the order of the names.

    Raises:
        ArgumentError: a name is unknown.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names in (["none"], []):
        return []
    if "all" in names:
        names = [name for name, (_, _, is_available) in TRACKERS.items() if is_available()]
    registered = registered_callbacks()
    unknown = [name for name in names if name not in TRACKERS and name not in registered]
    if unknown:
        known = sorted({*TRACKERS, *registered})
        raise ArgumentError(f"report_to={unknown[0]!r} is not a tracker. Choose of {', '.join(known)}, all, or none.")
    return [registered.get(name) or _own(name) for name in names]


def registered_callbacks() -> dict[str, Any]:
    """Returns the callbacks that somebody put into the original's `INTEGRATION_TO_CALLBACK`, by name."""
    module = sys.modules.get("transformers.integrations.integration_utils")
    table: dict[str, Any] = getattr(module, "INTEGRATION_TO_CALLBACK", {})
    home = getattr(module, "__name__", None)
    return {name: kind for name, kind in table.items() if kind.__module__ != home or name not in TRACKERS}


def _own(name: str) -> type[TrackerCallback]:
    module, kind, _ = TRACKERS[name]
    cls: type[TrackerCallback] = getattr(import_module(f"trainwright.trackers.{module}"), kind)
    return cls
