"""A bad sample in the second of two processes that each hold a part of the weights: `sharded.py FOLDER KIND...`."""

import sys
from pathlib import Path

from tests._support.two_processes import tell
from tests.capabilities.guard.matrix import ENGINES
from tests.capabilities.guard.poisoned import POISONS, Hears, trainer
from tests.capabilities.incidents.test_bundles import dropping, raising

BAD = 7  # the fourth row of the second step, which is the last one of the second process
SHARDED = {**ENGINES["fsdp"]["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}

if __name__ == "__main__":
    for kind in sys.argv[2:]:
        hears = Hears()
        is_error = kind == "error"
        settings = {
            "max_steps": 4,
            "logging_steps": 4,
            **ENGINES["fsdp"],
            "fsdp_config": SHARDED,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_async": False,
        }
        one = trainer(
            Path(sys.argv[1]) / kind,
            poison={BAD: {"flat": 2.0} if is_error else POISONS[kind]},
            settings=settings,
            callbacks=[hears],
            model=raising() if is_error else dropping(),
        )
        try:
            one.train()
        except Exception as error:
            tell(**{kind: type(error).__name__})
        else:
            tell(**{kind: hears.incidents[0].path})
