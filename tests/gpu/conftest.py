"""What these tests change for the whole process is put back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from trainwright.distributed.device import DETERMINISTIC_VARIABLES

# Before CUDA starts, for all of a process: torch gives its products of matrices the memory that the variable names when
# it first asks, and reads the variable again later. A larger value then makes them write beside that memory.
if torch.cuda.is_available():
    os.environ.update(DETERMINISTIC_VARIABLES)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Puts back what full determinism and compilation change."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch._dynamo.reset()
