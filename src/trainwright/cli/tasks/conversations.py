"""Conversations in the usual formats: messages, ShareGPT, instruction and output. No tokenizer here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainwright.cli.recipe.schema import Recipe
from trainwright.support.door import parse_json

Message = dict[str, Any]  # role and content, as chat templates take them; Any: tool calls

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Columns that are recognized by their name, and their role.
NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog"),
    "instruction": ("instruction", "prompt", "question", "query", "input"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
    "system": ("system", "system_prompt"),
}


class ConversationError(ValueError):
    """A row is not a conversation; the message has the reason."""


@dataclass(frozen=True)
class Shape:
    """The columns of conversations: `messages`; or `instruction`, optional `input`, and `output`; optional `system`."""

    columns: Mapping[str, str]  # role of the column -> its name
    system: str | None = None  # system message of rows without one

    def messages(self, row: Mapping[str, object]) -> list[Message]:
        """Returns the messages of a row; ConversationError if it is not a conversation."""
        found = self._read(row, with_output=True)
        if not any(turn["role"] == "assistant" and (turn["content"] or turn.get("tool_calls")) for turn in found):
            raise ConversationError("it has no answer")
        return found

    def prompt(self, row: Mapping[str, object]) -> list[Message]:
        """Returns the messages before the last answer, which may be missing; ConversationError if there are none."""
        found = self._read(row, with_output=False)
        while found and found[-1]["role"] == "assistant":
            found.pop()
        if not found:
            raise ConversationError("it has no message to answer")
        return found

    def _read(self, row: Mapping[str, object], *, with_output: bool) -> list[Message]:
        cells = {role: row.get(name) for role, name in self.columns.items()}
        if "messages" in cells:
            found = read_messages(cells["messages"], "user")
        else:
            asked = [cells["instruction"], *([cells["input"]] if cells.get("input") else [])]
            if len(asked) > 1 and all(isinstance(cell, str) for cell in asked):
                asked = ["\n\n".join(map(str, asked))]
            found = [turn for cell in asked for turn in read_messages(cell, "user")]
            found += read_messages(cells["output"], "assistant") if with_output else []
        system = cells.get("system") or self.system
        if system and found and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": str(system)})
        return found


def find_shape(recipe: Recipe, there: Sequence[str]) -> Shape | None:
    """Returns the columns of the conversations, named in the recipe or recognized; None if there are none."""
    named = {role: recipe.column(role) for role in NAMES if role in recipe.data.columns}
    found = {role: next((name for name in names if name in there), None) for role, names in NAMES.items()}
    of_pairs = "instruction" in named or "output" in named
    wanted = ("instruction", "input", "output") if of_pairs or found["messages"] is None else ("messages",)
    if "messages" in named:
        wanted = ("messages",)
    columns: dict[str, str] = {}
    for role in (*wanted, "system"):
        name = named.get(role) or found[role]
        if name is not None and name not in columns.values():
            columns[role] = name
    if "messages" in columns or {"instruction", "output"} <= columns.keys():
        return Shape(columns, recipe.data.system)
    return None


def is_conversation(cell: object) -> bool:
    """Returns True if a cell is a list of messages in a known format."""
    return (
        isinstance(cell, (list, tuple))
        and bool(cell)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in cell)
    )


def read_messages(cell: object, role: str) -> list[Message]:
    """Returns the messages of a cell: a list of them, possibly as JSON; or a single text in that role."""
    if isinstance(cell, str) and cell.lstrip().startswith("[{"):
        with suppress(ValueError):  # a text that begins like a list
            cell = parse_json(cell)
    if isinstance(cell, str):
        return [{"role": role, "content": cell}]
    if cell is None:
        return []
    if not is_conversation(cell):
        raise ConversationError(f"{_short(cell)} is neither text nor a list of messages with role and content")
    return [_message(turn) for turn in cell]  # type: ignore[attr-defined]


def _message(turn: Mapping[str, Any]) -> Message:
    given = turn.get("role", turn.get("from"))
    role = ROLES.get(str(given).lower())
    if role is None:
        raise ConversationError(f"the role {given!r} is not one of {', '.join(sorted(ROLES))}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, (list, tuple)):  # parts, as used by models with images
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ConversationError("a message has parts that are not text")
        content = "".join(part["text"] for part in content)
    others = {name: turn[name] for name in ("tool_calls", "name", "tool_call_id") if turn.get(name)}
    if not isinstance(content, str) and not others:
        raise ConversationError(f"the content of a message is not text: {_short(content)}")
    return {"role": role, "content": content or "", **others}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
