"""Members of the laws of extensions: the extensions of a run, and how it gets them.

Each capability has a `laws.py` among its tests, with its rows in these laws:

    HANGS       the test in which a partner of it hangs, or why it waits for none
    HOSTILE     the test with files of a stranger, or why it reads none
    MEMBERS     its members, by their names in the laws of pairs, if one process on the CPU has it
    OURS        modules of its folder, and functions of them, that refuse what transformers does not have; "" for all
    NOT_HERE    where it is tested, if one process on the CPU does not have it
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[1] / "capabilities"


def nothing(trainer: Any) -> None:
    """Changes nothing."""


@dataclass(frozen=True)
class Member:
    """An extension of a run, and how a run gets it."""

    name: str  # of the extension
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = nothing
    changes_training: bool = False


def read_laws() -> dict[str, ModuleType]:
    """Returns the rows of each capability, by its name."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/laws.py"))
    return {name: importlib.import_module(f"tests.capabilities.{name}.laws") for name in names}


def read_members() -> dict[str, Member]:
    """Returns the members that capabilities have among their tests."""
    return {name: one for law in read_laws().values() for name, one in getattr(law, "MEMBERS", {}).items()}
