"""A bad sample in the second of two processes that each hold a part of the weights: `sharded.py FOLDER KIND`."""

import sys
from pathlib import Path

from tests._support.two_processes import tell
from tests.guard.matrix import ENGINES
from tests.guard.poisoned import POISONS, Hears, trained

BAD = 7  # the fourth row of the second step, which is the last one of the second process

if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    hears = Hears()
    settings = {"max_steps": 4, "logging_steps": 4, **ENGINES["fsdp"]}
    trained(folder, poison={BAD: POISONS[kind]}, settings=settings, callbacks=[hears])
    (incident,) = hears.incidents
    tell(path=incident.path)
