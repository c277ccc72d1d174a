"""Optimizers of other packages: the class is imported when it is asked for, with an error that says what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import cast

from packaging.version import Version
from torch.optim import Optimizer

from trainwright.errors import MissingPackageError
from trainwright.optim.optimizer_spec import OptimizerSpec, Package

OptimizerClass = Callable[..., Optimizer]


def load_class(name: str, spec: OptimizerSpec) -> OptimizerClass:
    """Imports the class of an optimizer.

    Args:
        name: in `args.optim`, for messages.
        spec: its row of the table.

    Raises:
        MissingPackageError: its package is not there, is too old, or does not work on this machine.
    """
    module, _, attribute = spec.path.partition(":")
    if spec.package is None:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    found = _version(spec.package)
    if found is not None and Version(found) < Version(spec.package.at_least):
        problem = f"{spec.package.name} {found} is older than {spec.package.at_least}"
        raise MissingPackageError(f"optim={name!r}: {problem}. {_cure(spec.package)}")
    try:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        problem = f"the package {spec.package.name} is not installed"
        if found is not None:
            problem = f"{spec.package.name} {found} is installed, but {attribute} cannot be imported: {error}"
        raise MissingPackageError(f"optim={name!r}: {problem}. {_cure(spec.package)}") from error


def _version(package: Package) -> str | None:
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cure(package: Package) -> str:
    if package.at_least == "0":
        return f"Install it: pip install --upgrade {package.install}"
    return f"Install it: pip install --upgrade '{package.install}>={package.at_least}'"
