"""`trainwright mcp`: the commands as tools of the Model Context Protocol, over standard input and output.

A tool is a command: its arguments are those of the command line, and its answer is the document of `--json`. Each call
is a process of its own, so nothing is kept between two of them, and the server survives a killed training.
Source: modelcontextprotocol.io.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from trainwright.errors import needs_package
from trainwright.support.door import parse_json

SKILL = Path(__file__).parent.parent / "SKILL.md"


def answer_of(command: str, arguments: list[str], *, folder: str | None = None) -> dict[str, Any]:
    """Runs a command and returns its exit code, its JSON document, and its messages for people.

    Args:
        command: name of the command.
        arguments: as typed after it; `--json` is added.
        folder: working directory; None: that of this process.
    """
    words = [sys.executable, "-P", "-m", "trainwright", command, *arguments, "--json"]
    done = subprocess.run(
        words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
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
    async def call(arguments: list[str], folder: str | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(answer_of, command, arguments, folder=folder)

    return call
