"""ArrayStorage: allocates large results in memory, or in an unnamed file that is deleted with its last array.

The place is decided when an array is made. Its pages are only taken as rows are written, so memory promised to earlier
arrays counts as taken.
"""

from __future__ import annotations

import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.host import available_bytes

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]  # of any type that a model returns


class ArrayStorage:
    """Makes arrays for the results of one evaluation.

    Args:
        share: of the memory that is free now, in [0, 1]; arrays beyond it are in files.
        folder: folder of these files; if it does not exist, the system's folder for temporary files.
    """

    def __init__(self, *, share: float, folder: str | None = None) -> None:
        self._left_bytes = share * available_bytes()
        self._folder = folder if folder is not None and Path(folder).is_dir() else None
        self._has_told = False

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocates an array without content, in memory or in a file."""
        dtype = np.dtype(dtype)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes <= self._left_bytes or size_bytes == 0 or dtype.hasobject:
            self._left_bytes -= size_bytes
            return np.empty(shape, dtype=dtype)
        self._tell(size_bytes)
        with tempfile.TemporaryFile(prefix=".trainwright-results-", dir=self._folder) as file:
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)

    def give_back(self, array: Array) -> None:
        """Counts the memory of an array as free again."""
        if not isinstance(array, np.memmap):
            self._left_bytes += array.nbytes

    def _tell(self, size_bytes: int) -> None:
        if not self._has_told:
            logger.warning(
                "The results of this evaluation need %.1f GB and little more than %.1f GB of memory are free: they go "
                "to a temporary file in %s. preprocess_logits_for_metrics, or a metric with update() and compute(), "
                "keeps less.", size_bytes / 1e9, max(self._left_bytes, 0) / 1e9, self._folder or tempfile.gettempdir(),
            )  # fmt: skip
        self._has_told = True
