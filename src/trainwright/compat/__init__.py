"""Other libraries on Trainwright: what they import from transformers is ours. See `transformers.py`.

`helpers.py` has the original's helpers that nothing of ours calls.
"""

from __future__ import annotations

from trainwright.compat.transformers import Installed, install, uninstall

__all__ = ["Installed", "install", "uninstall"]
