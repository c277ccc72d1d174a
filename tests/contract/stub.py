"""The public names for type checkers, which do not run `__getattr__`: `src/trainwright/__init__.pyi`.

`python -m tests.contract.stub` writes the file from the table of names in `__init__.py`.
"""

from __future__ import annotations

from pathlib import Path

from trainwright import _HOMES, __all__

STUB = Path(__file__).parents[2] / "src" / "trainwright" / "__init__.pyi"


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


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as isort has them."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
