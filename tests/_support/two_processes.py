"""Runs a script under torchrun, in as many processes as asked; nothing it starts outlives the call.

A start costs about ten seconds, so a test puts a table of cases into one script. What the script has to say it writes
as JSON: `tell(**values)` in the script, `Done.told[rank]` in the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TOLD = "TOLD_"  # file of what a process tells, with its rank


@dataclass(frozen=True)
class Done:
    """A finished launch.

    Attributes:
        code: exit code of the launcher.
        out: standard output and error of everything, as it came.
        told: for each rank what it told, in one dict.
    """

    code: int
    out: str
    told: list[dict[str, Any]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def launch(
    script: Path | str,
    *arguments: str,
    folder: Path,
    processes: int = 2,
    launcher: tuple[str, ...] | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Starts a script (a path, or source text) in a process group of its own; its working directory is `folder`.

    `launcher`: a module and its options; () for none, so that the script is a task of its own.
    """
    if isinstance(script, str):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        script = path
    if launcher is None:
        launcher = ("torch.distributed.run", "--nproc-per-node", str(processes),
                    "--master-addr", "localhost", "--master-port", str(free_port()))  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "TOLD_FOLDER": str(folder),
        **(environment or {}),
    }
    return subprocess.Popen(
        [sys.executable, *(("-m", *launcher) if launcher else ()), str(script), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=folder, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], folder: Path, *, timeout_s: float = 100, processes: int = 2) -> Done:
    """Waits for a launch and reads what its processes told; whatever still runs then is killed."""
    try:
        out = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        end_group(process)
        raise AssertionError(f"not done after {timeout_s} s:\n{process.communicate()[0][-6000:]}") from None
    finally:
        end_group(process)
    files = [folder / f"{TOLD}{rank}.json" for rank in range(processes)]
    return Done(process.returncode, out, [json.loads(f.read_text()) if f.exists() else {} for f in files])


def run(
    script: Path | str, *arguments: str, folder: Path, processes: int = 2, timeout_s: float = 100, **how: Any
) -> Done:
    """`launch` and `finish`; fails if the launch did."""
    process = launch(script, *arguments, folder=folder, processes=processes, **how)
    done = finish(process, folder, timeout_s=timeout_s, processes=processes)
    assert done.code == 0, done.out[-6000:]
    return done


def end_group(process: subprocess.Popen[str]) -> None:
    """Kills a launcher and all below it: workers of torchrun have process groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for below in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                below.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def tell(**values: Any) -> None:
    """For scripts: keeps values for the test that launched them."""
    path = Path(os.environ["TOLD_FOLDER"]) / f"{TOLD}{os.environ.get('RANK', '0')}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **values}))
