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

from .._support import forked, two_processes

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


RANK_SCRIPT = """
import os, sys
os.environ["LOCAL_RANK"] = "0"  # as on two machines with one device each
sys.path.insert(0, {root!r})
from tests._support.two_processes import tell
from tests.accelerator.children import called
tell(result=called(*sys.argv[1:]))
"""


def on_two_standins(function: str, *arguments: Any, folder: Path) -> list[Any]:
    """Returns what a function returns in each of two processes of one run, with a device each."""
    env = {"ACCELERATE_TORCH_DEVICE": "accel:0", "STANDIN_DEVICES": "1"}
    script = RANK_SCRIPT.format(root=str(ROOT))
    done = two_processes.run(script, function, str(folder), json.dumps(arguments), folder=folder, environment=env)
    return [one["result"] for one in done.told]


def called(name: str, folder: str, arguments: str) -> Any:
    """Calls a function of these tests with the stand-in."""
    from .._support import standin

    standin.install()
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(f"tests.accelerator.{module}"), function)
    return found(Path(folder), *json.loads(arguments))


def main() -> None:
    print(MARK + json.dumps(called(*sys.argv[1:])), flush=True)


if __name__ == "__main__":
    main()
