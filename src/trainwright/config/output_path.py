"""Where a run writes: `output_dir` as an absolute path, resolved once: a later `os.chdir` does not move the run."""

from __future__ import annotations

import os
from typing import Any

RESOLVED = "_output_path"  # attribute of arguments: (output_dir as given, its absolute path)


def output_path(args: Any) -> str:  # arguments of transformers too
    """Returns the absolute path of `args.output_dir`, by the working directory in which the arguments were made.

    The field keeps its value. Arguments of transformers, and a value assigned later, are resolved by the first call.
    """
    given = str(args.output_dir)
    known = vars(args).get(RESOLVED)
    if known is None or known[0] != given:
        known = given, given if os.path.isabs(given) else os.path.abspath(given)
        vars(args)[RESOLVED] = known
    return str(known[1])
