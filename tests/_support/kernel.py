"""A Jupyter kernel in a fork, driven over its own protocol; cells keep what a front end would show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import forked

if TYPE_CHECKING:  # the quick tests also run where Jupyter is not installed
    from jupyter_client.blocking.client import BlockingKernelClient


@dataclass
class Output:
    """One output of a cell: of kind "display", "result", "stdout", "stderr" or "error"."""

    kind: str
    text: str  # its newest plain text
    html: str = ""  # its newest HTML


@dataclass
class Cell:
    """What a cell shows."""

    outputs: list[Output] = field(default_factory=list)
    num_updates: int = 0

    def of(self, kind: str) -> list[Output]:
        return [output for output in self.outputs if output.kind == kind]


class Kernel:
    """Runs cells one after the other."""

    def __init__(self, client: BlockingKernelClient, process: forked.Process) -> None:
        self._client = client
        self.process = process
        self._displays: dict[str, Output] = {}

    def run(self, code: str, *, seen: Callable[[Output], None] | None = None) -> Cell:
        """Runs code to its end; `seen` is called with each output, new or updated."""
        cell = Cell()

        def take(message: dict[str, Any]) -> None:
            kind = message["msg_type"]
            content = message["content"]
            output = None
            if kind in ("display_data", "execute_result", "update_display_data"):
                place = content.get("transient", {}).get("display_id", "")
                if kind == "update_display_data":
                    output = self._displays[place]
                    cell.num_updates = cell.num_updates + 1
                else:
                    output = Output("display" if kind == "display_data" else "result", "")
                    cell.outputs.append(output)
                    self._displays[place] = output
                output.text = content["data"]["text/plain"]
                output.html = content["data"].get("text/html", "")
            elif kind == "stream":
                output = Output(content["name"], content["text"])
                cell.outputs.append(output)
            elif kind == "error":
                lines = "\n".join(content["traceback"])
                output = Output("error", f"{content['ename']}: {content['evalue']}", html=lines)
                cell.outputs.append(output)
            if output is not None and seen is not None:
                seen(output)

        self._client.execute_interactive(code, timeout=240, output_hook=take, allow_stdin=False)
        return cell


@contextmanager
def running(folder: Path) -> Iterator[Kernel]:
    """A kernel whose working directory is `folder`."""
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.connect import write_connection_file

    path = folder / "kernel.json"
    write_connection_file(str(path), transport="ipc", ip=str(folder / "socket"))
    process = forked.start(["-m", "ipykernel_launcher", "-f", str(path)], cwd=folder)
    client = BlockingKernelClient(connection_file=str(path))
    client.load_connection_file()
    client.start_channels()
    try:
        _wait_until_up(client, process)
        yield Kernel(client, process)
    finally:
        client.stop_channels()
        process.kill()
        process.communicate(20)


def _wait_until_up(client: BlockingKernelClient, process: forked.Process) -> None:
    limit = time.monotonic() + 60
    while True:
        try:
            return client.wait_for_ready(timeout=5)
        except RuntimeError:
            assert process.poll() is None, process.communicate(5)[1]
            assert time.monotonic() < limit, "the kernel does not answer"
