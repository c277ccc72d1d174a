"""Which callbacks a trainer has without being asked, by the original's names."""

from __future__ import annotations

from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.progress import ProgressCallback

DEFAULT_CALLBACKS = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK = ProgressCallback
