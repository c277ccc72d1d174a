"""Table of trackers: name, class, and probe of its package. A class is imported when a run reports to it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainwright.errors import ArgumentError

if TYPE_CHECKING:
    from trainwright.trackers.base import TrackerCallback

# Name for report_to -> (module, class).
TRACKERS: dict[str, tuple[str, str]] = {
    "azure_ml": ("azureml", "AzureMLCallback"),
    "comet_ml": ("comet", "CometCallback"),
    "mlflow": ("mlflow", "MLflowCallback"),
    "neptune": ("neptune", "NeptuneCallback"),
    "tensorboard": ("tensorboard", "TensorBoardCallback"),
    "trackio": ("trackio", "TrackioCallback"),
    "wandb": ("wandb", "WandbCallback"),
    "codecarbon": ("codecarbon", "CodeCarbonCallback"),
    "clearml": ("clearml", "ClearMLCallback"),
    "dagshub": ("dagshub", "DagsHubCallback"),
    "flyte": ("flyte", "FlyteCallback"),
    "dvclive": ("dvclive", "DVCLiveCallback"),
    "swanlab": ("swanlab", "SwanLabCallback"),
    "kubeflow": ("kubeflow", "KubeflowCallback"),
}


def _found(*packages: str) -> bool:
    try:
        return all(importlib.util.find_spec(package) is not None for package in packages)
    except (ImportError, ValueError):
        return False


def _is_off(variable: str) -> bool:
    return os.environ.get(variable, "").upper() == "TRUE"


def is_tensorboard_available() -> bool:
    return _found("tensorboard") or _found("tensorboardX")


def is_wandb_available() -> bool:
    return _found("wandb")


def is_mlflow_available() -> bool:
    return _found("mlflow") and not _is_off("DISABLE_MLFLOW_INTEGRATION")


def is_comet_available() -> bool:
    """Whether Comet's client is installed and has an API key."""
    return _found("comet_ml") and ("COMET_API_KEY" in os.environ or _is_comet_configured())


def _is_comet_configured() -> bool:
    from trainwright.trackers.comet import is_configured

    return is_configured()


def is_trackio_available() -> bool:
    return _found("trackio")


def is_clearml_available() -> bool:
    return _found("clearml")


def is_neptune_available() -> bool:
    return _found("neptune")


def is_dvclive_available() -> bool:
    return _found("dvclive")


def is_codecarbon_available() -> bool:
    return _found("codecarbon")


def is_swanlab_available() -> bool:
    return _found("swanlab")


def is_dagshub_available() -> bool:
    return _found("dagshub", "mlflow")


def is_flytekit_available() -> bool:
    return _found("flytekit")


def is_flyte_deck_standard_available() -> bool:
    return _found("flytekit") and _found("flytekitplugins.deck")


def is_azureml_available() -> bool:
    return _found("azureml") and _found("azureml.core") and _found("azureml.core.run")


def is_kubeflow_available() -> bool:
    """Whether this process runs inside a Kubeflow TrainJob."""
    return "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and not _is_off("DISABLE_KUBEFLOW_INTEGRATION")


# In the order in which "all" reports to them; flyte works only inside of its own tasks and is named by hand.
PROBES: dict[str, Callable[[], bool]] = {
    "azure_ml": lambda: is_azureml_available() and not is_mlflow_available(),
    "comet_ml": is_comet_available,
    "dagshub": is_dagshub_available,
    "dvclive": is_dvclive_available,
    "mlflow": is_mlflow_available,
    "neptune": is_neptune_available,
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "codecarbon": is_codecarbon_available,
    "clearml": is_clearml_available,
    "swanlab": is_swanlab_available,
    "trackio": is_trackio_available,
    "kubeflow": is_kubeflow_available,
}


def installed_trackers() -> list[str]:
    """Returns the names of the trackers whose packages are installed."""
    return [name for name, is_available in PROBES.items() if is_available()]


def get_reporting_integration_callbacks(report_to: str | Sequence[str] | None) -> list[type[TrackerCallback]]:
    """Returns the classes of trackers.

    Args:
        report_to: one name, several names, "all" (those installed), or "none".

    Raises:
        ArgumentError: a name is unknown.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names in (["none"], []):
        return []
    names = installed_trackers() if "all" in names else names
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ArgumentError(
            f"report_to={unknown[0]!r} is no tracker. Choose of {', '.join(sorted(TRACKERS))}, all, or none."
        )
    return [_class_of(name) for name in names]


def _class_of(name: str) -> type[TrackerCallback]:
    module, kind = TRACKERS[name]
    found: type[TrackerCallback] = getattr(importlib.import_module(f"trainwright.trackers.{module}"), kind)
    return found
