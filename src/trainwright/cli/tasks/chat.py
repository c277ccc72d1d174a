"""Chat templates: the tokenizer's own or a named one; finds the tokens of answers, which carry the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources

from transformers import PreTrainedTokenizerBase

from trainwright._types import IGNORE_INDEX
from trainwright.cli.recipe.schema import CHAT_TEMPLATES
from trainwright.cli.tasks.conversations import ConversationError, Message
from trainwright.cli.tasks.source import Row, TaskSource, first_line
from trainwright.support.door import read_settings

GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
DEFAULT = "chatml"  # template of a tokenizer trained here


def use_template(material: TaskSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """Sets the recipe's chat template and its markers in the tokenizer; returns the number of added tokens.

    Raises:
        RecipeError: there is no template, or the markers would be new tokens of a model that cannot learn them.
    """
    recipe = material.recipe
    name = recipe.data.chat_template
    if name is None and tokenizer.chat_template is None:
        if recipe.model.learn_tokenizer is None:
            said = f"this tokenizer has no chat template. Set one: {', '.join(CHAT_TEMPLATES)}, or a .jinja file."
            material.wrong(said, "data", "chat_template")
        name = DEFAULT
    if name is None:
        return 0
    if name not in CHAT_TEMPLATES:
        tokenizer.chat_template = read_settings(name)
        return 0
    place = resources.files("trainwright.cli.tasks").joinpath(f"chat_templates/{name}.jinja")
    tokenizer.chat_template = place.read_text(encoding="utf-8")
    missing = [mark for mark in CHAT_TEMPLATES[name] if mark not in tokenizer.get_vocab()]
    if missing and recipe.lora is not None:
        said = (
            f"{name} is written with {', '.join(missing)}, which this tokenizer lacks, and an adapter learns "
            "no new tokens. Remove the entry to use the tokenizer's own template, or set plain, which needs none."
        )
        material.wrong(said, "data", "chat_template")
    return tokenizer.add_special_tokens({"additional_special_tokens": missing}) if missing else 0


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that end an answer: the end-of-text token, and the template's text after an answer."""
    asked: list[Message] = [{"role": "user", "content": "a"}]
    try:
        text = _rendered(tokenizer, [*asked, {"role": "assistant", "content": "a"}]).rstrip()
    except ConversationError:
        text = ""
    found = [tokenizer.eos_token] if tokenizer.eos_token is not None else []
    found += [mark for mark in map(str, tokenizer.get_added_vocab()) if mark not in found and text.endswith(mark)]
    return [tokenizer.convert_tokens_to_ids(mark) for mark in found]  # type: ignore[misc]


def rendered_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Returns messages as rendered by the template, up to where the answer begins; ConversationError if it refuses."""
    return _rendered(tokenizer, messages, prompt=True)


class AnswerMask:
    """Converts conversations to ids and labels; only tokens of answers have a label that carries loss.

    The template marks them with `{% generation %}` blocks. Without such blocks, each answer is the text that the
    template adds to the rendering of the earlier messages, provided that it leaves that rendering unchanged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool = False) -> None:
        """With `everything`, all tokens carry loss."""
        self._tokenizer = tokenizer
        self._everything = everything
        self._has_blocks = GENERATION.search(str(tokenizer.get_chat_template())) is not None
        self._marks = tuple(tokenizer.all_special_tokens)

    def __call__(self, messages: list[Message]) -> Row:
        """Returns `input_ids` and `labels`; ConversationError if the template refuses the messages or hides answers."""
        if self._everything:
            ids = self._tokenizer(_rendered(self._tokenizer, messages), add_special_tokens=False, verbose=False)
            return {"input_ids": ids["input_ids"], "labels": list(ids["input_ids"])}
        if self._has_blocks:
            try:
                found = self._tokenizer.apply_chat_template(
                    messages, return_assistant_tokens_mask=True, return_dict=True, tokenizer_kwargs={"verbose": False}
                )
            except Exception as error:  # a template may raise any error: TemplateError, TypeError, ...
                raise ConversationError(f"the chat template refuses it: {first_line(error)}") from None
            ids = found["input_ids"]  # type: ignore[index,call-overload]
            mask = found["assistant_masks"]  # type: ignore[index,call-overload]
        else:
            text = _rendered(self._tokenizer, messages)
            spans = list(self._spans(messages))
            given = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = given["input_ids"]
            mask = [
                any(start < end_of and at < stop for start, stop in spans) for at, end_of in given["offset_mapping"]
            ]
        return {"input_ids": ids, "labels": [one if own else IGNORE_INDEX for one, own in zip(ids, mask, strict=True)]}

    def _spans(self, messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
        """Yields where an answer starts and ends in the text, by rendering the messages before it and with it."""
        whole = _rendered(self._tokenizer, messages)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _rendered(self._tokenizer, messages[:number], prompt=True)
            upto = _rendered(self._tokenizer, messages[: number + 1])
            if not (upto.startswith(before) and whole.startswith(upto)):
                raise ConversationError(
                    "the chat template has no {% generation %} block and renders earlier messages differently when "
                    "others follow, so the answers cannot be located. Set data.chat_template to chatml or another "
                    "named template, or data.loss_on: all"
                )
            ended = upto.rstrip()
            yield len(before), len(ended if ended.endswith(self._marks) else upto)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, prompt: bool = False) -> str:
    if not messages:
        return ""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # see above
        raise ConversationError(f"the chat template refuses it: {first_line(error)}") from None
