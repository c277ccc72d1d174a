"""Table of search libraries: probe of the package, class of the backend, and the default."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

from trainwright._types import JSONObject, json_value
from trainwright.config.enums import HPSearchBackend
from trainwright.errors import ArgumentError, MissingPackageError
from trainwright.search.base import SearchBackend, Trial

logger = logging.getLogger(__name__)

GONE = {"sigopt": "SigOpt's service was shut down in 2024 and transformers took it out"}


def is_optuna_available() -> bool:
    return find_spec("optuna") is not None


def is_ray_available() -> bool:
    return find_spec("ray") is not None


def is_ray_tune_available() -> bool:
    return is_ray_available() and find_spec("ray.tune") is not None


def _is_wandb_available() -> bool:
    return find_spec("wandb") is not None


class SearchLibrary(NamedTuple):
    """Row of the table: probe, module and class of the backend, and its package for pip."""

    is_available: Callable[[], bool]
    home: str
    kind: str
    package: str


BACKENDS: dict[str, SearchLibrary] = {
    "optuna": SearchLibrary(is_optuna_available, "trainwright.search.optuna", "OptunaBackend", "optuna"),
    "ray": SearchLibrary(is_ray_tune_available, "trainwright.search.ray", "RayBackend", "'ray[tune]'"),
    "wandb": SearchLibrary(_is_wandb_available, "trainwright.search.wandb_sweep", "WandbBackend", "wandb"),
}


def select_backend(name: object) -> tuple[HPSearchBackend, SearchBackend]:
    """Returns the backend of a name, or the first installed one for None.

    Raises:
        ArgumentError: the name is unknown.
        MissingPackageError: the backend is not installed, or none is.
    """
    chosen = _installed() if name is None else _known(getattr(name, "value", name))
    row = BACKENDS[chosen]
    if not row.is_available():
        raise MissingPackageError(f"backend={chosen!r} needs a package that is not there: pip install {row.package}")
    return HPSearchBackend(chosen), getattr(importlib.import_module(row.home), row.kind)()


def _known(name: object) -> str:
    if name in GONE:
        raise ArgumentError(f"backend={name!r}: {GONE[name]}. Use {', '.join(map(repr, BACKENDS))}.")
    if name not in BACKENDS:
        raise ArgumentError(f"backend={name!r} is no backend of a search. Use {', '.join(map(repr, BACKENDS))}.")
    return str(name)


def _installed() -> str:
    found = [name for name, row in BACKENDS.items() if row.is_available()]
    if not found:
        ways = ", ".join(f"pip install {row.package}" for row in BACKENDS.values())
        raise MissingPackageError(f"A hyperparameter search needs one of these packages, and none is there: {ways}.")
    if len(found) > 1:
        logger.info("backend=%r is taken of those installed: %s.", found[0], ", ".join(found))
    return found[0]


def drawn(trial: Trial) -> JSONObject:
    """Returns the parameters of a trial of any backend as JSON: trials are dicts, or have them as `params`."""
    params = trial if isinstance(trial, Mapping) else getattr(trial, "params", {})
    return {str(name): json_value(value) for name, value in params.items()}
