"""Hides what `pip install trainwright EXTRA ...` does not bring, and tries the doors: `plain_install.py EXTRA ...`."""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from packaging.requirements import Requirement


def required(*names: str) -> set[str]:
    """The distributions that some need, and those that these need."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(one) for one in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        waiting += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


OWNERS = metadata.packages_distributions()
ALLOWED = required("trainwright", *sys.argv[1:])
HIDDEN = {name for name, dists in OWNERS.items() if {d.lower().replace("_", "-") for d in dists}.isdisjoint(ALLOWED)}
HIDDEN -= {"tests"}
assert {"IPython", "pytest", "sklearn"} <= HIDDEN


class Finder:
    """Finds what another finder finds, but no module of a distribution that is hidden."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found: ModuleSpec | None = None
        if name.partition(".")[0] not in HIDDEN:
            found = self._finder.find_spec(name, path, target)
        return found


sys.meta_path[:] = map(Finder, sys.meta_path)
# transformers asks the metadata which packages there are.
metadata.packages_distributions = lambda: {name: dists for name, dists in OWNERS.items() if name not in HIDDEN}

import trainwright  # noqa: E402
from trainwright import compat  # noqa: E402
from trainwright.cli.main import app  # noqa: E402

for name in trainwright.__all__:
    getattr(trainwright, name)
compat.install()
import transformers  # noqa: E402

assert transformers.Trainer is trainwright.Trainer
for extra in sys.argv[1:]:
    module = __import__(extra)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
compat.uninstall()
assert transformers.Trainer is not trainwright.Trainer
app(["--help"], standalone_mode=False)
