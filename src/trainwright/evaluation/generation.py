"""Batches for generation: split into prompt and answer, with tensors of a common width.

An encoder-decoder reads its inputs and writes the answer from nothing; its labels are the answer. A decoder-only model
continues its prompt, and evaluation data for it comes in two forms, both of which are taken:

    together   input_ids = prompt + answer, labels = -100 over the prompt, then the answer   (as for training)
    apart      input_ids = prompt, labels = answer, of any length

Which one it is shows in the labels: together they repeat the input wherever they are not -100. What comes out is the
same for both: prompts at the right edge (where generation continues), answers at the left edge, and the rows on
which the loss is taken. Running the model is left to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainwright._types import IGNORE_INDEX, Batch, Nested
from trainwright.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Inputs of a generation and the answers to compare with."""

    inputs: Batch  # arguments of `generate`
    labels: torch.Tensor | None  # the answers, one row per sample; None if the batch has none
    for_loss: Batch | None  # the batch that the loss is taken on; None without labels
    prompt_width: int = 0  # tokens at the start of each generated row that repeat the prompt
    is_joined: bool = False  # whether `for_loss` joins prompts and answers that the batch has separately


def make_task(batch: Batch, label_names: Sequence[str]) -> Task:
    """Makes the task of an encoder-decoder model: its inputs are all entries except labels and derived ones."""
    labels = batch.get("labels")
    decoder_input = batch.get("decoder_input_ids")
    skipped = {"labels", *label_names}
    if labels is not None and decoder_input is not None and labels.shape == decoder_input.shape:
        skipped |= {"decoder_input_ids", "decoder_attention_mask"}  # made of the labels: nothing would be left to write
    inputs = {name: value for name, value in batch.items() if name not in skipped}
    return Task(inputs=inputs, labels=labels, for_loss=None if labels is None else dict(batch))


def make_prompted_task(batch: Batch, label_names: Sequence[str], *, pad_token_id: int) -> Task:
    """Makes the task of a model that continues its prompt, padded on the left; DataError if there is no prompt."""
    ids = batch["input_ids"]
    labels = batch.get("labels")
    mask = whole = _make_mask(batch, pad_token_id)
    together = False
    if labels is not None and ids.shape == labels.shape:
        together = bool((labels.eq(ids) | labels.eq(IGNORE_INDEX)).all())  # they are the labels of the input itself
        mask = mask & (labels.ne(IGNORE_INDEX).cumsum(dim=1) == 0) if together else mask
    _check_prompts(mask, together=together)
    inputs = _prompts(batch, mask, skipped={"labels", *label_names}, pad_token_id=pad_token_id)
    width = inputs["input_ids"].shape[1]
    if labels is None:
        return Task(inputs=inputs, labels=None, for_loss=None, prompt_width=width)
    if together:
        for_loss = _at_left(batch, whole, pad_token_id=pad_token_id)
    else:
        for_loss = _joined(batch, inputs, labels, pad_token_id=pad_token_id)
    answers = pack(labels, labels.ne(IGNORE_INDEX), fill=IGNORE_INDEX)
    return Task(inputs=inputs, labels=answers, for_loss=for_loss, prompt_width=width, is_joined=not together)


def pack(rows: torch.Tensor, keep: torch.Tensor, *, fill: int, at_right: bool = False) -> torch.Tensor:
    """Moves the entries of rows (batch, tokens) that a mask keeps to one edge, in order; as wide as the longest row."""
    width = int(keep.sum(dim=1).max()) if keep.numel() else 0
    order = keep.to(torch.uint8).argsort(dim=1, stable=True, descending=not at_right)
    packed = rows.gather(1, order).masked_fill(~keep.gather(1, order), fill)
    return packed[:, packed.shape[1] - width :] if at_right else packed[:, :width]


def pad_right(rows: torch.Tensor, width: int, *, fill: int) -> torch.Tensor:
    """Pads rows with `fill` to a width; wider rows stay as they are."""
    missing = width - rows.shape[-1]
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (0, missing), value=fill)


def new_tokens(generated: Nested, task: Task, *, batch_size: int) -> torch.Tensor:
    """Removes the prompts from the rows of `generate`. Each sample has equally many rows, one after the other."""
    rows: torch.Tensor = generated["sequences"] if isinstance(generated, Mapping) else generated
    per_sample, rest = divmod(rows.shape[0], batch_size)
    if rest:
        raise DataError(
            f"generate() gave {rows.shape[0]} rows for {batch_size} samples; predictions need the same number of rows "
            "for each sample. Return num_return_sequences rows for each."
        )
    prompt = task.inputs.get("input_ids")
    width = task.prompt_width
    # Models that embed the prompt themselves return only the new tokens.
    if width == 0 or rows.shape[1] < width or prompt is None:
        return rows
    return rows[:, width:] if torch.equal(rows[:, :width], prompt.repeat_interleave(per_sample, 0)) else rows


def _make_mask(batch: Batch, pad_token_id: int) -> torch.Tensor:
    ids: torch.Tensor = batch["input_ids"]
    mask: torch.Tensor | None = batch.get("attention_mask")
    if mask is not None and mask.shape == ids.shape:
        return mask.bool()
    is_prompt = "labels" not in batch or batch["labels"].shape != ids.shape
    if is_prompt and bool(ids[:, -1].eq(pad_token_id).any()):
        raise DataError(
            "A batch of prompts has padding at its right end and no attention_mask to tell which tokens are padding. "
            "Let the collator pad on the left (tokenizer.padding_side = 'left'), or return an attention_mask."
        )
    return torch.ones_like(ids, dtype=torch.bool)


def _check_prompts(mask: torch.Tensor, *, together: bool) -> None:
    empty = ~mask.any(dim=1)
    if not bool(empty.any()):
        return
    row = int(empty.int().argmax())
    why = "its labels begin at the first token" if together else "its attention_mask is zero everywhere"
    raise DataError(
        f"predict_with_generate needs a prompt to continue, and row {row} of an evaluation batch has none: {why}. "
        "Set the labels of the prompt to -100, or give the prompt alone as input_ids and the answer as labels."
    )


def _prompts(batch: Batch, keep: torch.Tensor, *, skipped: set[str], pad_token_id: int) -> Batch:
    """Returns the prompts and their masks at the right edge; entries without a token dimension stay as they are."""
    ids: torch.Tensor = batch["input_ids"]
    moved: Batch = {}
    skipped = {*skipped, "position_ids", "attention_mask"}  # positions follow from the mask
    for name, value in ((name, value) for name, value in batch.items() if name not in skipped):
        along = isinstance(value, torch.Tensor) and value.shape == ids.shape
        fill = pad_token_id if name == "input_ids" else 0
        moved[name] = pack(value, keep, fill=fill, at_right=True) if along else value
    moved["attention_mask"] = pack(keep.to(ids.dtype), keep, fill=0, at_right=True)
    return moved


def _at_left(batch: Batch, mask: torch.Tensor, *, pad_token_id: int) -> Batch:
    """The batch with its padding at the right: padding at the left would shift the positions that a model counts."""
    if "position_ids" in batch or bool(mask[:, 0].all()):
        return dict(batch)
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    return {
        name: pack(value, mask, fill=fills.get(name, 0)) if getattr(value, "shape", None) == mask.shape else value
        for name, value in batch.items()
    }


def _joined(batch: Batch, prompts: Batch, labels: torch.Tensor, *, pad_token_id: int) -> Batch:
    """Prompt and answer in one row, padded at the right so that positions count from the first token."""
    is_answer = labels.ne(IGNORE_INDEX)
    ids = prompts["input_ids"]
    mask = prompts["attention_mask"].bool()
    keep = torch.cat([mask, is_answer], dim=1)
    tokens = torch.cat([ids, labels], dim=1)
    targets = torch.cat([torch.full_like(ids, IGNORE_INDEX), labels], dim=1)
    shape = batch["input_ids"].shape
    others = {n: value for n, value in batch.items() if n != "labels" and getattr(value, "shape", None) != shape}
    return {
        **others,
        "input_ids": pack(tokens, keep, fill=pad_token_id),
        "attention_mask": pack(keep.to(ids.dtype), keep, fill=0),
        "labels": pack(targets, keep, fill=IGNORE_INDEX),
    }
