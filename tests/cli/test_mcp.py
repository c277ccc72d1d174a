"""`trainwright mcp`, asked by the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from trainwright.cli.mcp_server import SKILL, answer_of

from .commands import small

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("default")]


async def conversation(folder: Path) -> dict[str, Any]:
    server = StdioServerParameters(command=sys.executable, args=["-m", "trainwright", "mcp"], cwd=str(folder))
    async with stdio_client(server) as (reads, writes), ClientSession(reads, writes) as session:
        begun = await session.initialize()
        tools = await session.list_tools()
        found: dict[str, Any] = {"instructions": begun.instructions, "tools": {one.name for one in tools.tools}}
        for name, command, arguments in (
            ("good", "train", ["config.yaml", "--dry-run"]),
            ("wrong", "train", ["config.yaml", "--set", "training.learning_rat=1"]),
        ):
            answer = await session.call_tool(command, {"arguments": arguments, "folder": str(folder)})
            found[name] = json.loads(answer.content[0].text)  # type: ignore[union-attr]
    return found


@pytest.mark.timeout(240)
def test_an_agent_gets_the_skill_and_the_answers_of_commands(tmp_path: Path) -> None:
    small(tmp_path)
    found = asyncio.run(asyncio.wait_for(conversation(tmp_path), timeout=200))
    assert found["instructions"] == SKILL.read_text(encoding="utf-8")
    assert {"init", "check", "train", "resume", "runs", "report", "verify", "replay"} <= found["tools"]
    assert "mcp" not in found["tools"]
    assert found["good"]["exit_code"] == 0
    assert found["good"]["answer"]["plan"]["model"]
    assert found["wrong"]["exit_code"] == 2
    assert "learning_rate" in found["wrong"]["answer"]["error"]["message"]


@pytest.mark.timeout(120)
def test_no_module_of_the_working_directory_is_imported(tmp_path: Path) -> None:
    """Those that the command imports, of this package, of others and of Python."""
    for name in ("typer", "xxhash", "torch", "json", "trainwright", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open('{name}.ran', 'w').close()\n")
    answer = answer_of("runs", ["."], folder=str(tmp_path))
    assert answer == {"exit_code": 0, "answer": [], "messages": ""}
    assert list(tmp_path.glob("*.ran")) == []
