"""Rules between settings: contradictions with their cure, and settings without effect.

A rule is a function in construction.py, start.py or advice.py, or in `rules.py` of a capability, registered with its
stage and its fields (stages.py).
All that is wrong is listed in one error. A rule is an error only where transformers' Trainer raises too, or where work
or correctness would be lost; otherwise it warns.
"""

import importlib

from trainwright.capability_table import TABLE
from trainwright.config.rules import advice, construction, start
from trainwright.config.rules.stages import advise, cautions, check_run, idle_in, refuse, violations

__all__ = ["advice", "advise", "cautions", "check_run", "construction", "idle_in", "refuse", "start", "violations"]

for _row in TABLE:
    if _row.rules:
        importlib.import_module(_row.rules)
