"""A training of which one step never ends: `hanging.py FOLDER`."""

import sys
import time
from pathlib import Path
from typing import Any

from tests.capabilities.guard.poisoned import Model, trained
from tests.contract import doubles


class Hangs(Model):
    """Waits in the forward pass of a batch with a sample that is marked."""

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> dict[str, Any]:
        if flat.sum() > 0:
            time.sleep(600)
        return super().forward(x, labels, constant, flat)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = {"hang_timeout": 5}
    trained(folder / "before")  # what a first training imports takes no time of the second one
    trained(folder, model=doubles.model(Hangs), poison={5: {"flat": 1.0}}, settings=settings)
