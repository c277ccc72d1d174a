"""Which tokens count for the loss of a language model: read from batches as the collator made them.

A token counts if its label is not -100; the first of a row never does where a model predicts the next token, since
nothing comes before it. A row of an encoder-decoder is its input, which does not count, and its labels. Padding is what
the attention mask leaves out, and the pad tokens at the end of a row. Where a batch holds several samples in one row,
positions that start again divide them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import nn

from trainwright._types import IGNORE_INDEX, Batch, counted, printable
from trainwright.capabilities.what_is_trained.roles import ASSISTANT, TEMPLATE, USER, find_openings, find_roles
from trainwright.support import model_facts
from trainwright.support.html_table import html_marked, html_table

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
MOST_TOKENS = 32_768  # that are looked at; a tenth of a second
NUM_EXAMPLES = 3
MOST_PARTS = 6  # parts of a row that are shown
EDGE = 40  # tokens at each end of a part that are decoded
PART_WIDTH = 80  # characters of a part that are shown
WIDTH = 240  # and of a row
MARKS = ("[[", "]]")

Part = tuple[str, bool]  # text, and whether it is trained


@dataclass(slots=True)
class _Row:
    """A sample without its padding; `paddings` are the labels of the padding that count."""

    ids: list[int]
    is_trained: list[bool]
    paddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTokens:
    """Tokens of one role in the rows of a batch, without padding."""

    role: str
    tokens: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """Tokens of the first batches of a run."""

    rows: int
    tokens: int  # without padding
    trained: int  # whose label counts
    rows_without: int  # rows of which no token counts
    trained_padding: int  # padding whose label counts
    roles: tuple[RoleTokens, ...] = ()  # of a chat; empty if no template tells the roles
    examples: tuple[tuple[Part, ...], ...] = field(default=())  # the first rows, in parts

    @property
    def is_chat(self) -> bool:
        """Whether there are turns of a user and of an assistant."""
        return {USER, ASSISTANT} <= {one.role for one in self.roles}

    def find_role(self, role: str) -> RoleTokens:
        """Returns the tokens of a role; none of any other."""
        return next((one for one in self.roles if one.role == role), RoleTokens(role=role, tokens=0, trained=0))

    @property
    def summary(self) -> str:
        """The numbers in a line."""
        share = f" ({self.trained / self.tokens:.1%})" if self.tokens else ""
        text = f"{self.trained:,} of {self.tokens:,}{share} in {counted(self.rows, 'row')} count for the loss"
        if self.rows_without:
            text += f", none in {counted(self.rows_without, 'row')}"
        shares = ", ".join(f"{one.role} {one.trained / one.tokens:.0%}" for one in self.roles if one.tokens)
        return f"{text}; by role: {shares}" if shares else text

    def lines(self) -> Iterator[str]:
        """Yields the summary, and the examples with the trained tokens in brackets."""
        yield f"tokens    {self.summary}"
        for number, parts in enumerate(self.examples):
            words = [f"{MARKS[0]}{text}{MARKS[1]}" if is_trained else text for text, is_trained in parts]
            is_first = number == 0 and any(is_trained for parts in self.examples for _, is_trained in parts)
            shown = f"row {number + 1}, [[trained]]" if is_first else f"row {number + 1}"
            yield f"{'':10}{shown}: {shorten(printable(' '.join(words)))}"

    def _repr_html_(self) -> str:
        rows = html_table([("tokens", self.summary)])
        return rows + "".join(html_marked(parts) for parts in self.examples)


def shorten(text: str) -> str:
    """Returns a text with its end left out if it is too long for a line."""
    return text if len(text) <= WIDTH else f"{text[:WIDTH]} ..."


def is_language_modelling(model: nn.Module, batch: Batch) -> bool:
    """Returns whether a batch has a label for each token, as those of language models have."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not _is_table(ids) or not _is_table(labels):
        return False
    core = model_facts.core_model(model)
    if type(core).__name__.endswith(CLASSIFIERS):
        return False
    if _has_encoder(core):
        return len(ids) == len(labels)
    if ids.shape != labels.shape:
        return False
    head = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    if head is not None:
        return True
    counts = labels.ne(IGNORE_INDEX)
    return bool(counts.any()) and bool(ids[counts].eq(labels[counts]).float().mean() > 0.5)


def _has_encoder(core: nn.Module) -> bool:
    """Returns whether a model reads one text and learns to write another: labels are not the inputs again."""
    return bool(getattr(getattr(core, "config", None), "is_encoder_decoder", False))


def _shifts_labels(core: Any) -> bool:
    """Returns whether a model compares a label with what it says at the place before it."""
    return not _has_encoder(core) and hasattr(core, "can_generate") and bool(core.can_generate())


def _is_table(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def read_tokens(batches: Sequence[Batch], model: nn.Module, processing_class: Any) -> TrainedTokens | None:
    """Returns which tokens of batches count; None if they are not those of a language model.

    Args:
        batches: as the collator made them.
        model: the model that is trained.
        processing_class: decodes tokens, and has the chat template; None: tokens are shown as numbers.
    """
    if not batches or not all(is_language_modelling(model, one) for one in batches):
        return None
    core = model_facts.core_model(model)
    if _has_encoder(core):
        rows = list(_pairs(batches, processing_class))
    else:
        rows = list(_rows(batches, processing_class, shifts=_shifts_labels(core)))
    openings = find_openings(processing_class)
    tokens = Counter[str]()
    trained = Counter[str]()
    for row in rows if openings else ():
        roles = find_roles(row.ids, openings)
        tokens.update(roles)
        trained.update(role for role, counts in zip(roles, row.is_trained, strict=True) if counts)
    order = sorted(tokens, key=lambda role: (role == TEMPLATE, role != USER, role))
    by_role = [RoleTokens(role=role, tokens=tokens[role], trained=trained[role]) for role in order]
    is_chat = tokens[USER] > 0 and tokens[ASSISTANT] > 0
    return TrainedTokens(
        rows=len(rows),
        tokens=sum(len(row.ids) for row in rows),
        trained=sum(sum(row.is_trained) for row in rows),
        rows_without=sum(not any(row.is_trained) for row in rows),
        trained_padding=sum(row.paddings for row in rows),
        roles=tuple(by_role) if is_chat else (),
        examples=tuple(tuple(_parts(row, processing_class)) for row in rows[:NUM_EXAMPLES]),
    )


def _pairs(batches: Sequence[Batch], processing_class: Any) -> Iterator[_Row]:
    """Yields the samples of an encoder-decoder, up to a number of tokens: the input, and what it learns to write."""
    seen = 0
    pad = _pad_token(processing_class)
    for batch in batches:
        mask = _same_shape(batch.get("attention_mask"), batch["input_ids"])
        both = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        for number, (inputs, labels) in enumerate(both):
            if seen >= MOST_TOKENS:
                return
            source = [one for place, one in enumerate(inputs) if mask is None or mask[number, place]]
            target = [one for one in labels if one != IGNORE_INDEX]
            end = len(target)
            while pad is not None and end and target[end - 1] == pad:
                end -= 1
            seen += len(inputs) + len(labels)
            is_trained = [False] * len(source) + [True] * end
            yield _Row(ids=[*source, *target[:end]], is_trained=is_trained, paddings=len(target) - end)


def _rows(batches: Sequence[Batch], processing_class: Any, *, shifts: bool) -> Iterator[_Row]:
    """Yields the samples of batches, up to a number of tokens; `shifts`: the first label of a row never counts."""
    seen = 0
    pad = _pad_token(processing_class)
    for batch in batches:
        ids = batch["input_ids"]
        mask = _same_shape(batch.get("attention_mask"), ids)
        positions = _same_shape(batch.get("position_ids"), ids)
        for number in range(len(ids)):
            if seen >= MOST_TOKENS:
                return
            tokens = ids[number].tolist()
            counts = batch["labels"][number].ne(IGNORE_INDEX).tolist()
            counts[0] = counts[0] and not shifts
            keep = [True] * len(tokens) if mask is None else mask[number].ne(0).tolist()
            if pad is not None:
                for place in range(len(tokens) - 1, -1, -1):
                    if tokens[place] != pad:
                        break
                    keep[place] = False
            starts = [0] if positions is None else _starts(positions[number].tolist(), keep)
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                places = [place for place in range(start, end) if keep[place]]
                seen += end - start
                if places:
                    yield _Row(
                        ids=[tokens[place] for place in places],
                        is_trained=[counts[place] for place in places],
                        paddings=sum(counts[start:end]) - sum(counts[place] for place in places),
                    )


def _same_shape(value: object, ids: torch.Tensor) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and value.shape == ids.shape else None


def _starts(positions: list[int], keep: list[bool]) -> list[int]:
    """Returns where the samples of a row begin: where positions do not go on."""
    inner = [i for i in range(1, len(positions)) if keep[i] and positions[i] <= positions[i - 1]]
    return [0, *inner]


def _pad_token(processing_class: Any) -> int | None:
    """Returns the pad token, unless it also ends a text."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad != getattr(tokenizer, "eos_token_id", None) else None


def _parts(row: _Row, processing_class: Any) -> Iterator[Part]:
    """Yields the text of a row in parts, each trained or not, with the middle of long ones left out."""
    pairs = groupby(zip(row.ids, row.is_trained, strict=True), key=lambda one: one[1])
    runs = [(counts, [token for token, _ in run]) for counts, run in pairs]
    for counts, ids in runs[:MOST_PARTS]:
        if len(ids) <= 2 * EDGE:
            text = _decoded(ids, processing_class)
        else:
            text = f"{_decoded(ids[:EDGE], processing_class)} ... {_decoded(ids[-EDGE:], processing_class)}"
        half = PART_WIDTH // 2
        yield (text if len(text) <= PART_WIDTH else f"{text[:half]} ... {text[-half:]}"), counts
    if len(runs) > MOST_PARTS:
        yield f"... and {counted(len(runs) - MOST_PARTS, 'part')} more", False


def _decoded(ids: list[int], processing_class: Any) -> str:
    try:
        return str(processing_class.decode(ids))
    except Exception:  # no tokenizer, or tokens that it does not know
        return " ".join(map(str, ids))
