"""Functions of the user that a file names: `module:function` of an installed package, or `file.py:function`.

A module is looked up in the installation, not in the working directory. A file is named with `.py`, is beside the
configuration file, and is never one in a directory of a model or of a run, which may be a stranger's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.errors import RecipeError, did_you_mean

NO_CODE = "TRAINWRIGHT_NO_USER_CODE"  # a variable that a server sets for its commands
SUFFIX = ".py"
# A directory with one of these is that of a model or of a run.
SIGNS = ("adapter_config.json", "model.safetensors", "model.safetensors.index.json", "trainer_state.json")


def is_function_name(text: str) -> bool:
    """Returns whether a text has the form `module:function` or `file.py:function`."""
    place, sign, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return bool(sign) and name.isidentifier() and (place.endswith(SUFFIX) or is_module)


def resolve(text: str, base: Path) -> str:
    """Returns the name with an absolute path, if it names a file."""
    place, _, name = text.rpartition(":")
    return f"{(base / Path(place).expanduser()).absolute()}:{name}" if place.endswith(SUFFIX) else text


def load_function(text: str, *, entry: str) -> Callable[..., Any]:
    """Imports a function.

    Args:
        text: `module:function`, or an absolute `/path/file.py:function`.
        entry: entry of the configuration file that names it, for errors.

    Raises:
        RecipeError: it cannot be found or imported, or may not be.
    """
    if os.environ.get(NO_CODE):
        raise RecipeError(
            f"{entry}: {text} is the user's code, which this server does not run. A person can run the command in a "
            "terminal."
        )
    place, _, name = text.rpartition(":")
    try:
        module = _import_file(Path(place), entry) if place.endswith(SUFFIX) else _import_module(place, entry)
    except RecipeError:
        raise
    # whatever the user's module raises
    except Exception as error:
        raise RecipeError(f"{entry}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        there = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise RecipeError(f"{entry}: {place} has no function {name!r}.{did_you_mean(name, there)}")
    function: Callable[..., Any] = found
    return function


def _import_file(path: Path, entry: str) -> Any:
    if not path.is_file():
        there = [one.name for one in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise RecipeError(f"{entry}: there is no file {path}.{did_you_mean(path.name, there)}")
    real = path.resolve()
    for folder in real.parents:
        sign = next((sign for sign in SIGNS if (folder / sign).exists()), None)
        if sign is not None:
            raise RecipeError(
                f"{entry}: {path} is in a directory of a model or a run ({folder} has {sign}), from which no code is "
                "run. Move it beside your configuration file."
            )
    name = f"trainwright_user_code_{real.stem}"
    spec = importlib.util.spec_from_file_location(name, real)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Classes are pickled by the name of their module, as for a worker of a data loader.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, entry: str) -> Any:
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names:
        raise RecipeError(f"{entry}: {name} is a module of Python itself. Name a function of your own.")
    with _without_working_directory():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise RecipeError(
                f"{entry}: no module {name} is installed. For a file beside the configuration file, write "
                f"{name.replace('.', '/')}.py:FUNCTION."
            ) from None


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """Leaves the working directory out of the search: it may be the directory of a model."""
    here = os.path.realpath(os.getcwd())
    before = list(sys.path)
    sys.path[:] = [one for one in before if one and os.path.realpath(one) != here]
    try:
        yield
    finally:
        sys.path[:] = before


def check_metrics(found: object, *, entry: str) -> dict[str, float]:
    """Returns the metrics that a function of the user returned; RecipeError unless they are numbers by name."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise RecipeError(f"{entry}: it returned a {type(found).__name__}, and a dict of name -> number belongs there.")
    try:
        return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError):
        raise RecipeError(f"{entry}: it returned {found!r:.200}; each value must be a number.") from None
