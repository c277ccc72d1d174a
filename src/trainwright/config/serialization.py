"""Values of arguments as plain data: what JSON can hold, and no token."""

from __future__ import annotations

from enum import Enum
from pathlib import PurePath
from typing import Any

SIMPLE = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:  # Any: a tree of whatever arguments hold
    """`value` as strings, numbers, lists and dicts; what is neither nor can turn into one stays as it is."""
    if type(value) in SIMPLE:  # nearly all of them
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type):
        return value
    for method in ("to_dict", "to_json"):
        if callable(convert := getattr(value, method, None)):
            return plain(convert())
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def stand_in(name: str, value: Any) -> Any:
    """`value`, or for a token the mark that is written in its place."""
    return f"<{name.upper()}>" if name.endswith("_token") else value
