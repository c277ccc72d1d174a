"""`trainwright mcp`: the commands as tools of the Model Context Protocol, over standard input and output.

A tool is a command: its arguments are those of the command line, and its answer is the document of `--json`. Each call
is a process of its own, so nothing is kept between two of them, and the server survives a killed training.
Source: modelcontextprotocol.io.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from trainwright.errors import needs_package
from trainwright.support.deadline import run_command
from trainwright.support.door import parse_json

LIMIT_S = 86_400.0  # seconds: a command may train
TIMED_OUT = 124  # exit code, as that of `timeout`
SKILL = Path(__file__).parent.parent / "SKILL.md"


def answer_of(
    command: str,
    arguments: list[str],
    *,
    folder: str | None = None,
    limit_s: float = LIMIT_S,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Runs a command and returns its exit code, its JSON document, and its messages for people.

    Args:
        command: name of the command.
        arguments: as typed after it; `--json` is added.
        folder: working directory; None: that of this process.
        limit_s: seconds after which the command is ended, with all that it has started.
        stop: ends it too, when it is set.
    """
    words = [sys.executable, "-P", "-m", "trainwright", command, *arguments, "--json"]
    try:
        done = run_command(words, seconds=limit_s, folder=folder, warns=True, stop=stop)
    except subprocess.TimeoutExpired:
        message = f"trainwright {command} was ended after {limit_s:g} s; timeout_s sets another limit."
        return {"exit_code": TIMED_OUT, "answer": None, "messages": message}
    try:
        answer = parse_json(done.stdout)
    except ValueError:  # `predict` to standard output writes JSON lines
        answer = done.stdout
    return {"exit_code": done.returncode, "answer": answer, "messages": done.stderr[-4000:]}


def serve(commands: dict[str, str]) -> None:
    """Serves until standard input ends.

    Args:
        commands: name -> what it does, in a sentence.

    Raises:
        MissingPackageError: the package `mcp` is not installed.
    """
    with needs_package("trainwright mcp needs the package mcp: pip install 'mcp>=2.3'."):
        from mcp.server.mcpserver import MCPServer
    server = MCPServer("trainwright", instructions=SKILL.read_text(encoding="utf-8"))
    for name, about in commands.items():
        server.add_tool(_tool(name), name=name, description=f"{about} Arguments as on the command line.")
    server.run()


def _tool(command: str) -> Callable[..., Awaitable[dict[str, Any]]]:
    async def call(arguments: list[str], folder: str | None = None, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        stop = threading.Event()
        try:
            return await asyncio.to_thread(answer_of, command, arguments, folder=folder, limit_s=timeout_s, stop=stop)
        finally:  # the server ends, or the client does not wait any longer
            stop.set()

    return call
