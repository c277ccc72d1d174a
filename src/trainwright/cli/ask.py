"""`trainwright chat`: asks a trained model in the terminal, or line by line for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright._types import is_url, printable
from trainwright.command_line import FAILED, AnyPlace, AsJson, amount, answers_alone, place, print_line, print_text

if TYPE_CHECKING:
    from trainwright.cli.tasks.conversation import Answer, Conversation

HELP = "/reset starts a new conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer."
PROMPT = "> "


def chat(
    model: Annotated[
        AnyPlace, typer.Argument(help="A run, a checkpoint, or a model; a path or URL.", metavar="RUN", parser=place)
    ],
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    once: Annotated[str | None, typer.Option(help="Send this message, print the answer, exit.", metavar="TEXT")] = None,
    weights: Annotated[str, typer.Option(help="Which weights: trained or average.", metavar="KIND")] = "trained",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of an answer, in tokens.", metavar="N")] = 512,
    temperature: Annotated[
        float, typer.Option(parser=amount, metavar="NUMBER", help="Sampling temperature; 0: no sampling.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Chat with a trained model, in the template it was trained with."""
    from trainwright.cli.remote_runs import fetch_checkpoint
    from trainwright.cli.tasks.conversation import open_conversation

    settings: dict[str, Any] = {"system": system, "weights": weights, "max_new_tokens": max_new_tokens}
    with (
        answers_alone(),
        fetch_checkpoint(model) as local,
        open_conversation(local, **settings, temperature=temperature) as talk,
    ):
        if talk.note:
            print_line(talk.note.replace(f"{local.parent}/", "") if is_url(model) else talk.note, err=True)
        if once is not None:
            _ask(talk, once, as_json=as_json)
        else:
            _converse(talk, as_json=as_json)


def _converse(talk: Conversation, *, as_json: bool) -> None:
    """Asks a line of standard input after the other, until it ends.

    Raises typer.Exit with FAILED if a program reads the answers, and a line has none.
    """
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # a byte that is no text is an error of its line alone
    is_typed = sys.stdin.isatty() and not as_json
    if is_typed:
        print_line(HELP, err=True)
    are_all_answered = True
    while (line := _next_line(is_typed)) is not None:
        text = line.strip()
        if text == "/quit":
            break
        if text == "/reset":
            talk.reset()
            print_line("A new conversation starts.", err=True)
        elif text.startswith("/") and text[1:].isalpha():
            print_line(f"{printable(text)} is not a command. {HELP}", err=True)
        elif text:
            are_all_answered &= _ask(talk, text, as_json=as_json, can_go_on=True)
    if not is_typed and not are_all_answered:
        raise typer.Exit(FAILED)


def _next_line(is_typed: bool) -> str | None:
    """Returns the next line of standard input; None at its end."""
    while True:
        if is_typed:
            print_line(PROMPT, err=True, ends=False)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print_line(f"\n{HELP}", err=True)
            continue
        if not line and is_typed:
            print_line("", err=True)
        return line or None


def _ask(talk: Conversation, text: str, *, as_json: bool, can_go_on: bool = False) -> bool:
    """Asks a question and prints the answer, piece by piece for a person; returns False if there is none."""
    from trainwright.errors import DataError

    try:
        _check_text(text)
        answer = talk.ask(text, None if as_json else _print_piece)
    except DataError as error:
        if not can_go_on:
            raise
        if as_json:
            print_text(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}, ensure_ascii=False))
        print_line(str(error), err=True)
        return False
    if as_json:
        print_text(printable(json.dumps(answer.to_dict(), ensure_ascii=False)))
    else:
        _print_piece("\n")
    _say_how_it_ended(answer, as_json=as_json, can_go_on=can_go_on)
    return True


def _check_text(text: str) -> None:
    """Raises DataError for a line with bytes that are no text."""
    from trainwright.errors import DataError

    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError("This line of standard input is not UTF-8 text, so it was not asked.") from None


def _say_how_it_ended(answer: Answer, *, as_json: bool, can_go_on: bool) -> None:
    if answer.is_stopped and not can_go_on:
        raise KeyboardInterrupt
    if as_json:
        return
    if answer.is_stopped:
        print_line("(stopped)", err=True)
    if answer.num_forgotten:
        print_line(f"(the first {answer.num_forgotten} messages no longer fit into the model's context)", err=True)
    if answer.is_cut:
        print_line("(cut off by --max-new-tokens, or by the end of the model's context)", err=True)


def _print_piece(text: str) -> None:
    """Writes a piece of an answer to the terminal at once, in the characters that it has."""
    shown = printable(text, lines=True)
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
    print_text(shown.encode(encoding, "replace").decode(encoding), ends=False)
