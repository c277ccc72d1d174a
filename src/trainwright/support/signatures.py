"""What can be read of a callable of the user's: its parameters and its code. Nothing here raises.

Objects with `__call__`, functions of C, `functools.partial` and mocks may have neither; a signature that the user
declares may raise anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

# Any: whatever the user put in the place of a function.
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def read_signature(function: Any) -> inspect.Signature | None:
    """Returns the signature of a callable; None if it has none that can be read."""
    try:
        return inspect.signature(function)
    except Exception:
        return None


def read_parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a callable by name; None if it has no signature that can be read."""
    signature = read_signature(function)
    return None if signature is None else signature.parameters


def takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Returns True if `**kwargs` is among the parameters."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def read_code(function: Any) -> CodeType | None:
    """Returns the code of a function inside its decorators; None for anything else."""
    try:
        code = getattr(inspect.unwrap(function), "__code__", None)
    except Exception:
        return None
    return code if isinstance(code, CodeType) else None
