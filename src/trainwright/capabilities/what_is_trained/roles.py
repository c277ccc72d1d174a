"""Who speaks in the tokens of a chat: found by the marks with which a chat template opens the turn of each role.

The template itself is asked: a conversation with known words is rendered, and what stands between the words are the
marks. So the tokens of a batch can be given to roles long after the messages were turned into tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

USER = "user"
ASSISTANT = "assistant"
TEMPLATE = "template"  # marks before the words of a turn, and what comes before the first turn
WORDS = ("first question", "first answer", "second question", "second answer")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
LIKE_USER = ("system", "tool")  # roles whose marks are those of the user with another name


def read_template(processing_class: Any) -> str:
    """Returns the chat template of a tokenizer or a processor; "" without one."""
    template = getattr(processing_class, "chat_template", None)
    if isinstance(template, Mapping):  # several, by name
        template = template.get("default")
    return template if isinstance(template, str) else ""


def marks_answers(processing_class: Any) -> bool:
    """Returns whether a chat template marks which tokens are the assistant's."""
    return GENERATION.search(read_template(processing_class)) is not None


def find_openings(processing_class: Any) -> dict[str, list[int]]:
    """Returns the tokens that open a turn, by role; empty if the template shows none, or the same for all roles."""
    if not read_template(processing_class):
        return {}
    try:
        found = _openings(processing_class)
    except Exception:  # a template that refuses the conversation, or a tokenizer of another kind
        return {}
    user = found.get(USER)
    assistant = found.get(ASSISTANT)
    if not user or not assistant or user == assistant:
        return {}
    return {role: ids for role, ids in found.items() if role in (USER, ASSISTANT) or ids not in ([], user, assistant)}


def _openings(processing_class: Any) -> dict[str, list[int]]:
    def render(number: int, **how: Any) -> str:
        messages = [{"role": (USER, ASSISTANT)[i % 2], "content": WORDS[i]} for i in range(number)]
        return str(processing_class.apply_chat_template(messages, tokenize=False, **how))

    def encode(text: str) -> list[int]:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        return [int(one) for one in tokenizer.encode(text.strip(), add_special_tokens=False)]

    rest = render(len(WORDS))
    between = []
    for word in WORDS:
        before, found, rest = rest.partition(word)
        if not found:
            return {}
        between.append(before)
    first, to_answer, to_question, _ = between
    openings = {USER: _common_end(encode(first), encode(to_question))}
    prompt = render(1, add_generation_prompt=True).removeprefix(render(1))
    openings[ASSISTANT] = encode(prompt if prompt.strip() and prompt.strip() in to_answer else to_answer)
    for role in LIKE_USER if USER in to_question else ():
        others = [text.replace(USER, role) for text in (first, to_question)]
        openings[role] = _common_end(*map(encode, others))
    return openings


def _common_end(one: list[int], other: list[int]) -> list[int]:
    """Returns the end that two marks have in common; `other` if they have none."""
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return other[len(other) - length :] if length else other


def find_roles(ids: Sequence[int], openings: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns the role of each token of a row.

    Args:
        ids: tokens of the row.
        openings: result of `find_openings`.
    """
    roles = []
    by_first: dict[int, list[tuple[str, Sequence[int]]]] = {}
    for role, opening in sorted(openings.items(), key=lambda one: -len(one[1])):
        by_first.setdefault(opening[0], []).append((role, opening))
    speaker = TEMPLATE
    marks_left = 0
    for place, token in enumerate(ids):
        for role, opening in by_first.get(token, ()):
            if list(ids[place : place + len(opening)]) == list(opening):
                speaker = role
                marks_left = len(opening)
                break
        roles.append(TEMPLATE if marks_left else speaker)
        marks_left = max(marks_left - 1, 0)
    return roles
