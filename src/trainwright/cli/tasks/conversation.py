"""A conversation with a trained model: history, template, context, and the answer as it is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright._types import JSONObject
from trainwright.cli.recipe.recipe_reader import read_tree
from trainwright.cli.recipe.schema import TASKS
from trainwright.cli.tasks.applied import guess_task, recipe_file
from trainwright.cli.tasks.chat import end_tokens, rendered_prompt
from trainwright.cli.tasks.conversations import ConversationError, Message
from trainwright.cli.tasks.export import Model, chosen, chosen_checkpoint
from trainwright.cli.tasks.models import quiet_transformers
from trainwright.cli.tasks.opened import open_tokenizer, open_trained
from trainwright.distributed.world import World
from trainwright.errors import ArgumentError, CheckpointNotFoundError, DataError

ASKED = ("chat", "causal-lm", "preference")
LEAST_SHARE = 4  # at least one in so many positions of the context is left to the answer

OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of a model.

    Attributes:
        text: the answer, without special tokens.
        num_tokens: tokens of the answer.
        num_prompt_tokens: tokens that the model read for it.
        is_cut: it reached the limit of tokens before its end.
        is_stopped: Ctrl-C stopped it.
        num_forgotten: messages that did not fit into the model's context any more.
    """

    text: str
    num_tokens: int
    num_prompt_tokens: int
    is_cut: bool
    is_stopped: bool
    num_forgotten: int

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return {
            "answer": self.text,
            "tokens": self.num_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "is_cut": self.is_cut,
            "is_stopped": self.is_stopped,
            "messages_forgotten": self.num_forgotten,
        }


class Conversation:
    """A conversation with a model.

    Args:
        model: writes text; on the device on which it is asked.
        tokenizer: the model's, with its template.
        system: first message; None for none.
        is_plain: continue texts as they are, without template and history.
        max_new_tokens: of an answer.
        temperature: of the draw of tokens; 0 for the likeliest.
        note: about the model, for the console.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        *,
        system: str | None = None,
        is_plain: bool = False,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        note: str = "",
    ) -> None:
        self.note = note
        self._model = model
        self._tokenizer = tokenizer
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._history: list[Message] = []
        self._is_plain = is_plain
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._ends = _end_ids(model, tokenizer, is_plain=is_plain)
        config = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._positions: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the system message."""
        return [*self._first, *self._history]

    def reset(self) -> None:
        """Forgets the conversation; the system message stays."""
        self._history.clear()

    def ask(self, text: str, on_text: OnText | None = None) -> Answer:
        """Asks a question, and keeps it and the answer in the history.

        Args:
            text: message of the user.
            on_text: called with each piece of the answer.

        Raises:
            DataError: the message does not fit into the model's context, or the template refuses it.
        """
        asked: Message = {"role": "user", "content": text}
        ids, num_forgotten = self._prompt(asked)
        room = self._max_new_tokens if self._positions is None else self._positions - len(ids)
        limit = min(self._max_new_tokens, room)
        new, is_stopped, written = self._generate(ids, limit, on_text)
        answer = written if is_stopped else str(self._tokenizer.decode(new, skip_special_tokens=True))
        if not self._is_plain:
            self._history = [*self._history[num_forgotten:], asked, {"role": "assistant", "content": answer}]
        return Answer(
            text=answer,
            num_tokens=len(new),
            num_prompt_tokens=len(ids),
            is_cut=not is_stopped and len(new) >= limit and new[-1] not in self._ends,
            is_stopped=is_stopped,
            num_forgotten=num_forgotten,
        )

    def _prompt(self, asked: Message) -> tuple[list[int], int]:
        """Returns the ids of a prompt, and how many of the oldest messages are left out so that it fits."""
        most = None
        if self._positions is not None:
            most = self._positions - max(1, min(self._max_new_tokens, self._positions // LEAST_SHARE))
        for start in range(0, len(self._history) + 1, 2):
            ids = self._encode([*self._first, *self._history[start:], asked])
            if most is None or len(ids) <= most:
                return ids, start
        raise DataError(
            f"The message has {len(ids)} tokens with its template, and the model reads {most} besides an answer. Ask "
            "something shorter."
        )

    def _encode(self, messages: list[Message]) -> list[int]:
        if self._is_plain:
            ids: list[int] = self._tokenizer(messages[-1]["content"], verbose=False)["input_ids"]
            while ids and ids[-1] in self._ends:
                # A tokenizer that ends each text would end the one to be continued.
                ids.pop()
            if not ids:
                raise DataError("The text has no tokens. Ask something else.")
            return ids
        try:
            text = rendered_prompt(self._tokenizer, messages)
        except ConversationError as error:
            cure = " Omit --system, or write it into the first message." if self._first else ""
            raise DataError(f"The message cannot be asked: {error}.{cure}") from None
        found: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _generate(self, ids: list[int], limit: int, on_text: OnText | None) -> tuple[list[int], bool, str]:
        """Returns the new ids, whether Ctrl-C stopped them, and the text that was written by then."""
        given = torch.tensor([ids], device=self._model.device)
        pad = self._tokenizer.pad_token_id
        settings: JSONObject = {"do_sample": self._temperature > 0}
        if self._temperature > 0:
            settings["temperature"] = self._temperature
        streamer = _Streamer(self._tokenizer, on_text)
        with quiet_transformers(), torch.no_grad():
            try:
                found = self._model.generate(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=limit,
                    eos_token_id=sorted(self._ends) or None,
                    pad_token_id=next((one for one in (pad, *sorted(self._ends)) if one is not None), 0),
                    streamer=streamer,
                    **settings,
                )
            except KeyboardInterrupt:
                return streamer.ids, True, "".join(streamer.pieces)
        return found[0, len(ids) :].tolist(), False, "".join(streamer.pieces)


class _Streamer:
    """Receives the tokens of an answer from `generate`, and gives their text on as soon as it is settled."""

    def __init__(self, tokenizer: Any, on_text: OnText | None) -> None:
        from transformers import TextStreamer

        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._is_prompt = True
        self._on_text = on_text
        self._inner: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        setattr(self._inner, "on_finalized_text", self._take)  # noqa: B010 -- a method is not assigned to

    def put(self, value: torch.Tensor) -> None:
        """Takes new ids; those of the prompt come first."""
        if not self._is_prompt:
            self.ids += value.flatten().tolist()
        self._is_prompt = False
        self._inner.put(value)

    def end(self) -> None:
        """Gives on the rest of the text."""
        self._inner.end()

    def _take(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        if self._on_text is not None and text:
            self._on_text(text)


def _end_ids(model: Model, tokenizer: Any, *, is_plain: bool) -> set[int]:
    """Returns the ids that end an answer: the model's own, the tokenizer's, and those of its template."""
    own = getattr(model.generation_config, "eos_token_id", None)
    found = set(own if isinstance(own, (list, tuple)) else [own])
    found |= {tokenizer.eos_token_id} if is_plain else set(end_tokens(tokenizer))
    return {one for one in found if one is not None}


@contextmanager
def open_conversation(
    run: Path,
    *,
    system: str | None = None,
    weights: str = "trained",
    max_new_tokens: int = 512,
    temperature: float = 0.0,
) -> Iterator[Conversation]:
    """Opens the model of a run, a checkpoint, an adapter or an exported directory, to be asked.

    Args:
        run: the directory.
        system: first message; None for that of the run's recipe, if it has one.
        weights: "trained" or "average".
        max_new_tokens: of an answer.
        temperature: of the draw of tokens; 0 for the likeliest.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        ArgumentError: the model does not write text, or has no template for a system message.
        CheckpointError: the model or its tokenizer cannot be loaded.
    """
    if not run.is_dir():
        raise CheckpointNotFoundError(f"There is no directory {run}.")
    if weights not in ("trained", "average"):
        raise ArgumentError(f"--weights {weights}: write trained or average.")
    source, why = chosen(run) if weights == "trained" else chosen_checkpoint(run)
    file = recipe_file(run)
    value: JSONObject = {} if file is None else read_tree(file).value
    task = value.get("task") if file is not None else guess_task(source)
    _check_task(run, task)
    notes = [f"From {source}: {why}."] if why else []
    bits = (value.get("model") or {}).get("quantization")
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = open_tokenizer(source)
        is_plain = task == "causal-lm" or tokenizer.chat_template is None
        if is_plain:
            notes.append("The model was trained on plain text: it continues what you write, without the texts before.")
        if is_plain and system is not None:
            raise ArgumentError("--system needs a model with a chat template, and this one continues plain text.")
        if system is None and not is_plain:
            system = (value.get("data") or {}).get("system")
        model = open_trained(source, scratch=Path(scratch), weights=weights, bits=bits)
        is_on_cpu = bool((value.get("training") or {}).get("use_cpu"))
        if bits is None:
            model.to("cpu" if is_on_cpu else World.detect().device)
        yield Conversation(
            model,
            tokenizer,
            system=system,
            is_plain=is_plain,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            note="\n".join(notes),
        )


def _check_task(run: Path, task: str | None) -> None:
    """Raises ArgumentError for a model that does not write text in answer to one, with the command that works."""
    if task in ASKED:
        return
    known = f"The model in {run} is for {task}" if task in TASKS else f"{run} has no model that writes text"
    option = "" if task in TASKS else " --task TASK"
    raise ArgumentError(
        f"{known}, and chat asks models that write text. Use: trainwright predict {run}{option} --data FILE."
    )
