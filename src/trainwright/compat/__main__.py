"""`python -m trainwright.compat script.py ...`: a script, or `-m module`, with Trainwright in transformers' place."""

from __future__ import annotations

import os
import runpy
import sys

from trainwright.compat import install

USAGE = "usage: python -m trainwright.compat (script.py | -m module) [arguments ...]"


def main() -> None:
    """Runs the script or module that the command line names, with transformers' names replaced."""
    given = sys.argv[1:]
    is_module = given[:1] == ["-m"]
    given = given[1:] if is_module else given
    if not given or given[0].startswith("-"):
        wants_help = given[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if wants_help else sys.stderr)
        raise SystemExit(0 if wants_help else 2)
    target = given[0]
    done = install()
    print(f"trainwright.compat: {len(done.replaced)} names of transformers are Trainwright's.", file=sys.stderr)
    sys.argv = given
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(target):
        raise SystemExit(f"trainwright.compat: there is no script {target!r}.")
    sys.path[0] = os.path.dirname(os.path.abspath(target))  # where python itself would look for its neighbours
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
