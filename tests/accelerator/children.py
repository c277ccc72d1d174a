"""Processes with the stand-in accelerator: `on_the_standin` runs a function of a module of these tests in one.

The stand-in changes torch for the whole process, so each test has a fork of its own; what the function returns comes
back as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from .._support import forked

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "


def on_the_standin(
    function: str, *arguments: Any, folder: Path, devices: int = 1, timeout_s: float = 250, **more: str
) -> Any:
    """Returns what `module.name`, a function of this folder, returns for a folder and arguments that JSON can hold."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_TORCH_DEVICE": "accel",
        "STANDIN_DEVICES": str(devices),
        **more,
    }
    command = ["-m", "tests.accelerator.children", function, str(folder), json.dumps(arguments)]
    done = forked.run(command, env=env, cwd=ROOT, timeout=timeout_s)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK))
    return json.loads(line.removeprefix(MARK))


def main() -> None:
    from .._support import standin

    standin.install()
    name, folder, arguments = sys.argv[1:]
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(f"tests.accelerator.{module}"), function)
    result = found(Path(folder), *json.loads(arguments))
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
