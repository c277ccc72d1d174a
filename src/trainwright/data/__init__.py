"""Data: the order of samples, their batches, and the position of a run in them.

Transformers' collators can be imported from here too, as from its package of this name.
"""

from __future__ import annotations

import sys
from typing import Any

_COLLATORS = ("DataCollator", "DefaultDataCollator", "default_data_collator")  # how their names begin


def __getattr__(name: str) -> Any:
    if not name.startswith(_COLLATORS):
        # Python asks for each submodule too, and none of them may load transformers.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sys.modules["trainwright"]._at_original_path("data", name)
