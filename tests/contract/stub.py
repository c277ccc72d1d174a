"""What type checkers read, since they do not run it: the public names, and our arguments with those of each capability.

`python -m tests.contract.stub` writes `src/trainwright/__init__.pyi` from the table of names in `__init__.py`, and
`config/fields/our_fields.pyi` from the groups of fields.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from trainwright import _HOMES, __all__
from trainwright.config.fields import OurFields

PACKAGE = Path(__file__).parents[2] / "src" / "trainwright"
STUB = PACKAGE / "__init__.pyi"
FIELDS_STUB = PACKAGE / "config" / "fields" / "our_fields.pyi"
FIELDS_HEAD = """\
from dataclasses import dataclass
from typing import Any

from trainwright.config.setting import FieldGroup

@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OurFields(FieldGroup, group="Only in Trainwright"):
"""


def stub() -> str:
    """Returns the text of the stub, in the form that `ruff format` and `ruff check` leave as it is."""
    lines = []
    for module, names in sorted(_HOMES.items()):
        if len(names) == 1:
            lines.append(f"from {module} import {names[0]}")
        else:
            lines += [f"from {module} import (", *(f"    {name}," for name in sorted(names, key=_order)), ")"]
    public = [f'    "{name}",' for name in sorted(__all__, key=_order)]
    return "\n".join([*lines, "", "__version__: str", "", "__all__ = [", *public, "]", ""])


def fields_stub() -> str:
    """Returns the text of the stub of our arguments."""
    lines = [f"    {name}: {kind} = ..." for name, kind in inspect.get_annotations(OurFields).items()]
    return FIELDS_HEAD + "\n".join(lines) + "\n"


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as isort has them."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    FIELDS_STUB.write_text(fields_stub(), encoding="utf-8")
