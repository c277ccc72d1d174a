"""Forks of one process that has imported what scripts need: a script starts in a tenth of a new interpreter's time.

`start` stands in for `subprocess.Popen([sys.executable, ...])` where the start itself is not what is tested: a fork
has the imports, so that variables which packages read when they are imported must not differ. The child ends as any
interpreter does, with its exit code, traceback and exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
SERVER = "ADDRESS_OF_FORKS"  # variable with the address of a parent process
IMPORTS = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "accelerate",
    "datasets",
    "safetensors.torch",
    "transformers.data.data_collator",
    "transformers.modeling_utils",
    "transformers.optimization",
    "transformers.trainer_utils",
    "transformers.training_args",
    "trainwright",
    "trainwright.checkpoint",
    "trainwright.cli.main",
    "trainwright.run",
    "trainwright.trainer",
)


class Process:
    """A fork that runs; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self, pid: int, status: IO[str], stdin: IO[str] | None, stdout: IO[str] | None, stderr: IO[str] | None
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._status = status
        self._readers: list[threading.Thread] = []
        self._texts = ["", ""]

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns all of standard output and standard error, once both are closed."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            files = [file for file in (self.stdout, self.stderr) if file is not None]
            self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in enumerate(files)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        self.wait(None if end is None else max(0.1, end - time.monotonic()))
        return self._texts[0], self._texts[1]

    def _read(self, index: int, file: IO[str]) -> None:
        with file:
            self._texts[index] = file.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            code, cpu_s = self._status.readline().split()
            self.returncode = int(code)
            self._status.close()
            _ended.cpu_s += float(cpu_s)
        return self.returncode


class _Ended:
    """CPU seconds of the forks that have ended, which are no children of this process."""

    cpu_s = 0.0


_ended = _Ended()


def ended_cpu_s() -> float:
    """Returns the CPU seconds of this process's forks that have ended, with those of their own processes."""
    return _ended.cpu_s


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    merge_output: bool = False,
    terminal: int | None = None,
    stdin: bool = False,
    start_new_session: bool = False,
) -> Process:
    """Runs a script, `-c CODE` or `-m MODULE` with its arguments in a fork.

    Args:
        arguments: what would follow `python` on a command line.
        env: the whole environment; by default that of this process.
        cwd: working directory; by default that of this process.
        merge_output: standard error goes where standard output goes.
        terminal: descriptor to which both go, in place of a pipe.
        stdin: standard input is a pipe; otherwise it is empty.
        start_new_session: as in `subprocess.Popen`.

    Returns:
        The process; its output comes as text.
    """
    request = {
        "arguments": list(map(str, arguments)),
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
        "session": start_new_session,
    }
    outputs = [] if terminal is not None else [os.pipe() for _ in range(1 if merge_output else 2)]
    status = os.pipe()
    source = os.pipe() if stdin else None
    writes = [write for _, write in outputs] or [terminal]
    passed = [writes[0], writes[-1], status[1], *([source[0]] if source else [])]
    socket.send_fds(_server(), [json.dumps(request).encode()], passed)
    for descriptor in {*passed} - {terminal}:
        os.close(descriptor)
    state = os.fdopen(status[0], buffering=1)
    pid = int(state.readline())
    files = [os.fdopen(read, encoding="utf-8", errors="replace") for read, _ in outputs]
    ours = os.fdopen(source[1], "w", encoding="utf-8") if source else None
    return Process(pid, state, ours, files[0] if files else None, files[1] if len(files) == 2 else None)


def run(arguments: Sequence[str], *, timeout: float = 250, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a fork to its end, as `subprocess.run(..., capture_output=True, text=True)` would."""
    process = start(arguments, **how)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(arguments), process.wait(), out, err)


def address() -> str:
    """Returns the name under which the processes of this test run find the one that forks."""
    return os.environ.get(SERVER) or f"trainwright-forks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"


@cache
def _server() -> socket.socket:
    """Connects to the process with the imports; all workers of a test run share one, which ends with the last of them.

    The first that asks starts it: an address that has no file is taken by one process, and free once nobody uses it.
    """
    name = f"\0{address()}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError:
            _connect(ours, name)
        else:
            listener.listen(64)
            ours.connect(name)
            atexit.register(_start_server(listener).wait)
    atexit.register(ours.close)
    return ours


def _connect(ours: socket.socket, name: str) -> None:
    """Connects to the server of another worker, which may not listen yet."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return ours.connect(name)
        time.sleep(0.1)
    raise AssertionError("the worker that has the address of the forks does not listen")


def _start_server(listener: socket.socket) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        env=env,
        cwd=ROOT,
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Forks for each request, until nobody is connected; returns in the child, with the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    connections = [listener.accept()[0]]
    while connections:
        for one in select.select([listener, *connections], [], [])[0]:
            if one is listener:
                connections.append(listener.accept()[0])
                continue
            data, descriptors, _, _ = socket.recv_fds(one, 1 << 20, 4)
            if not data:
                connections.remove(one)
                one.close()
            elif os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, *connections):
                    other.close()
                _keep(descriptors)
                return json.loads(data)  # type: ignore[no-any-return]
            for descriptor in descriptors:
                os.close(descriptor)
    sys.stderr.flush()
    os._exit(0)


def _keep(descriptors: list[int]) -> None:
    """Forks the child, in which it returns; writes its pid, and at its end the exit code and the CPU seconds."""
    out, err, status, *source = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(status)
        for number, descriptor in ((1, out), (2, err), *((0, one) for one in source)):
            os.dup2(descriptor, number)
    for descriptor in (out, err, *source):
        os.close(descriptor)
    if pid == 0:
        return
    os.write(status, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    used = os.times()
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{code} {used.children_user + used.children_system:.2f}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Does what an interpreter does with its command line."""
    import numpy as np

    np.random.seed()  # as in a new process; the others reseed themselves
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    first, *rest = request["arguments"]
    option = first if first in ("-c", "-m") else None
    main = rest.pop(0) if option else first
    sys.path[:0] = ["" if option else str(Path(main).resolve().parent), *(p for p in paths if p and p not in sys.path)]
    sys.argv = [option or main, *rest]
    if option == "-m":
        runpy.run_module(main, run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if option is None:
        module.__file__ = main
    source = main if option else Path(main).read_text(encoding="utf-8")
    exec(compile(source, "<string>" if option else main, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    gc.disable()
    for _name in IMPORTS:
        importlib.import_module(_name)
    del sys.path[0]  # the folder of this file
    gc.collect()
    gc.freeze()
    gc.enable()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
