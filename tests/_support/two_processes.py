"""Runs a script in as many processes as asked, as forks or under a launcher; nothing it starts outlives the call.

Forks have the variables of torchrun and start at once; a start under a launcher costs about ten seconds, so a test that
needs one puts a table of cases into one script. What the script has to say it writes as JSON: `tell(**values)` in the
script, `Done.told[rank]` in the test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from . import forked

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
    """Returns a port that is free now, and that stays so until a test's server takes it.

    It lies below those that the system gives to outgoing connections, of which other tests open hundreds; one process
    never returns the same port twice, and processes that run tests at the same time begin at different ones.
    """
    for port in _PORTS:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            return port
    raise AssertionError("unreachable: the ports are a cycle")


def _ports() -> Iterator[int]:
    first = 10_000
    count = 22_000  # Linux gives outgoing connections 32768 and above
    step = 7919  # a prime: processes with neighbouring numbers begin far from each other
    return (first + (os.getpid() * step + i) % count for i in itertools.count())


_PORTS = _ports()


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
    script = _written(script, folder)
    if launcher is None:
        launcher = (
            "torch.distributed.run",
            "--nproc-per-node",
            str(processes),
            "--master-addr",
            "localhost",
            "--master-port",
            str(free_port()),
        )
    env = _environment(folder, environment)
    return subprocess.Popen(
        [sys.executable, *(("-m", *launcher) if launcher else ()), str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=folder,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, *, timeout_s: float = 250, processes: int = 2) -> Done:
    """Waits for a launch and reads what its processes told; whatever still runs then is killed."""
    try:
        out = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        end_group(process)
        raise AssertionError(f"not done after {timeout_s} s:\n{process.communicate()[0][-6000:]}") from None
    finally:
        end_group(process)
    return Done(process.returncode, out, _told(folder, processes))


def run(
    script: Path | str,
    *arguments: str,
    folder: Path,
    processes: int = 2,
    timeout_s: float = 250,
    launcher: tuple[str, ...] | None = None,
    environment: dict[str, str] | None = None,
) -> Done:
    """Runs a script to its end, in forks if no launcher is named (see `launch`); fails if a process did."""
    if launcher is None:
        ranks = start_forks(script, *arguments, folder=folder, processes=processes, environment=environment)
        done = finish_forks(ranks, folder, timeout_s=timeout_s)
    else:
        process = launch(script, *arguments, folder=folder, launcher=launcher, environment=environment)
        done = finish(process, folder, timeout_s=timeout_s, processes=processes)
    assert done.code == 0, done.out[-6000:]
    return done


def start_forks(
    script: Path | str, *arguments: str, folder: Path, processes: int = 2, environment: dict[str, str] | None = None
) -> list[forked.Process]:
    """Starts a script as a launcher does: one process for each rank."""
    script = _written(script, folder)
    env = _environment(folder, environment) | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    return [
        forked.start(
            [str(script), *arguments],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            merge_output=True,
            start_new_session=True,
        )
        for rank in range(processes)
    ]


def finish_forks(ranks: list[forked.Process], folder: Path, *, timeout_s: float = 250, grace_s: float = 0) -> Done:
    """Waits for all ranks; once one has failed, the others are killed, after a grace in which they may end."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        ends = {pool.submit(rank.communicate, timeout_s): rank for rank in ranks}
        for end in as_completed(ends):
            if end.exception() or ends[end].returncode != 0:
                wait(ends, timeout=grace_s)
                for rank in ranks:
                    end_group(rank)
        for rank in ranks:
            end_group(rank)
        out = "\n".join(rank.communicate(10)[0] for rank in ranks)
        late = any(end.exception() for end in ends)
    return Done(1 if late or any(rank.returncode for rank in ranks) else 0, out, _told(folder, len(ranks)))


def _written(script: Path | str, folder: Path) -> Path:
    if isinstance(script, Path):
        return script
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return path


def as_forks(script: str, folder: Path) -> Path:
    """Writes a script for a launcher that runs the given one in a fork, whose output and exit code become its own.

    Only for scripts that end by themselves: a signal reaches the launcher's process, not the fork.
    """
    stub = folder / "stub.py"
    stub.write_text(
        f"import sys\nfrom tests._support import forked\n"
        f"done = forked.run([{str(_written(script, folder))!r}, *sys.argv[1:]])\n"
        f"print(done.stdout, done.stderr)\nsys.exit(done.returncode)\n"
    )
    return stub


def _environment(folder: Path, more: dict[str, str] | None) -> dict[str, str]:
    paths = os.pathsep.join([str(forked.ROOT), *sys.path])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "TOLD_FOLDER": str(folder),
        forked.SERVER: forked.address(),
        **(more or {}),
    }


def _told(folder: Path, processes: int) -> list[dict[str, Any]]:
    files = [folder / f"{TOLD}{rank}.json" for rank in range(processes)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def end_group(process: subprocess.Popen[str] | forked.Process) -> None:
    """Kills a process and all below it: workers of torchrun have process groups of their own."""
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
