"""Functions of the user that a file names: `module:function` of an installed package, or `file.py:function`.

A module is looked up in the installation, not in the working directory. A file is named with `.py`, is beside the
configuration file, and is never one in a directory of a model or of a run, which may be a stranger's.

The recipe of a run may be a stranger's too. A command on a run calls only functions that this user has trained with on
this machine, which a list in the cache directory has, or names in the command.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainwright._types import PREFIX_CHECKPOINT_DIR, JSONObject, write_text
from trainwright.cli.recipe.yaml_tree import Tree, make_absolute
from trainwright.errors import RecipeError, did_you_mean
from trainwright.support.door import read_json, read_settings

NO_CODE = "TRAINWRIGHT_NO_USER_CODE"  # a variable that a server sets for its commands
SUFFIX = ".py"
# A directory with one of these is that of a model or of a run.
SIGNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.bin",
    "pytorch_model*.bin",
    "journal.jsonl",
    "recipe.yaml",
    "trainer_state.json",
    f"{PREFIX_CHECKPOINT_DIR}-*",
)
OF_THE_TRAINER = ("epoch", "loss", "runtime", "samples_per_second", "step", "steps_per_second")
MOST_REMEMBERED = 1000
DIGITS = 12  # of a digest
MAX_BYTES = 1 << 20  # of the list of functions
OF_PROCESSES = Path("/proc")  # whose links lead to other places in each process
# Functions that the commands of this process named.
_named: set[str] = set()


def is_function_name(text: str) -> bool:
    """Returns whether a text has the form `module:function` or `file.py:function`."""
    place, sign, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return bool(sign) and name.isidentifier() and (place.endswith(SUFFIX) or is_module)


def resolve(text: str, base: Path) -> str:
    """Returns the name with an absolute path, if it names a file."""
    place, _, name = text.rpartition(":")
    return f"{make_absolute(base / Path(place).expanduser())}:{name}" if place.endswith(SUFFIX) else text


def digest_source(text: str) -> str | None:
    """Returns a digest of the file of a function, or of the module; None if it cannot be read."""
    place = text.rpartition(":")[0]
    try:
        spec = None if place.endswith(SUFFIX) else importlib.util.find_spec(place)
        path = Path(place if spec is None or spec.origin is None else spec.origin)
        return hashlib.sha256(read_settings(path).encode()).hexdigest()[:DIGITS]
    except (ImportError, OSError, ValueError):
        return None


def find_functions(value: JSONObject) -> list[tuple[tuple[str, ...], str]]:
    """Returns the functions that a configuration file names, each after the path of its entry."""
    data = value.get("data")
    metrics = value.get("metrics")
    found: list[tuple[tuple[str, ...], Any]] = [
        (("metrics",), one) for one in (metrics if isinstance(metrics, list) else [metrics])
    ]
    found += [(("data", "map"), data.get("map"))] if isinstance(data, dict) else []
    return [(path, text) for path, text in found if isinstance(text, str) and is_function_name(text)]


def allow_functions(tree: Tree, base: Path, *, typed_only: bool = False) -> None:
    """Takes the functions in a configuration for named by the user.

    Args:
        tree: the entries of the file and of the command.
        base: directory that relative paths in the file begin at.
        typed_only: takes only those that an option of the command names: the file may be a stranger's.
    """
    for path, text in find_functions(tree.value):
        if tree.is_typed(path) or not typed_only:
            _named.add(resolve(text, tree.find_base(base, path)))


def remember_functions(value: JSONObject) -> None:
    """Adds the functions of a run that begins to the list of this user; one that cannot be written is no error."""
    names = [text for _, text in find_functions(value)]
    if names:
        kept = list(dict.fromkeys([*_remembered(), *names]))[-MOST_REMEMBERED:]
        with suppress(OSError):
            _functions_path().parent.mkdir(parents=True, exist_ok=True)
            write_text(_functions_path(), json.dumps(kept))


def _remembered() -> list[str]:
    try:
        found = read_json(_functions_path(), max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _functions_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright" / "functions.json"


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
    if text not in _named and text not in _remembered():
        raise RecipeError(
            f"{entry}: the run names {text}, with which you have not trained on this machine. Look at it, and name it "
            f"yourself to run it: --set {entry}={text}"
        )
    place, _, name = text.rpartition(":")
    try:
        module = _import_file(Path(place), entry) if place.endswith(SUFFIX) else _import_module(place, entry)
    except RecipeError:
        raise
    # whatever the user's module raises, an exit too
    except (Exception, SystemExit) as error:
        neighbour = ". Modules beside it are not found: write all in one file, or install them"
        cure = neighbour if place.endswith(SUFFIX) and isinstance(error, ModuleNotFoundError) else ""
        raise RecipeError(f"{entry}: {place} cannot be imported: {type(error).__name__}: {error}{cure}") from error
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
    if path.is_relative_to(OF_PROCESSES):
        raise RecipeError(f"{entry}: {path} is another place in each process. Name the file where it is.")
    real = path.resolve()
    for folder in real.parents:
        sign = next((found.name for sign in SIGNS for found in folder.glob(sign)), None)
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
    wrong = next((name for name in found if name in OF_THE_TRAINER or not name.isprintable()), None)
    if wrong is not None:
        raise RecipeError(f"{entry}: it returned a score {wrong!r}, which is a name of the trainer's. Take another.")
    try:
        return {name: float(value) for name, value in found.items()}
    except (OverflowError, TypeError, ValueError):
        raise RecipeError(f"{entry}: it returned {found!r:.200}; each value must be a number.") from None


def describe_failure(error: BaseException) -> str:
    """Returns what the user's code raised, and its line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"
