"""Other libraries on Trainwright: what they import from transformers is ours. The work is in `transformers.py`."""

from __future__ import annotations

from trainwright.compat.transformers import Installed, install, uninstall

__all__ = ["Installed", "install", "uninstall"]
