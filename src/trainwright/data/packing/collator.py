"""Tensors of a batch of packed rows, with what tells a model which tokens belong together; no model is known here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainwright._types import IGNORE_INDEX, Batch, Item
from trainwright.errors import DataError

MASK = "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLayout:
    """Form in which a model learns where samples begin."""

    # "positions": by position ids that restart, from which transformers makes its masks; "blocks": by a mask of each
    # token for each token; "flat": one row of all samples, with their bounds, for kernels that take them
    form: Literal["positions", "blocks", "flat"]
    causal: bool = False  # a mask hides later tokens, too
    additive: torch.dtype | None = None  # type of a mask that is added to the scores; None: True is what may be seen
    first_position: int | None = 0  # position id of a sample's first token; None: the model takes no position ids


class PackedCollator:
    """Makes a batch of rows: the items' tensors one after the other, filled up on the right to the longest row."""

    def __init__(
        self,
        data_collator: Callable[[list[Item]], Batch],
        layout: PackingLayout,
        *,
        length_of: str = "input_ids",
        pad_token_id: int = 0,
        masks_first: bool = False,
        multiple_of: int | None = None,
    ) -> None:
        # makes tensors of the items of all rows, padded or not; what it pads is taken off again
        self.data_collator = data_collator
        self.layout = layout  # tells the model where samples begin
        self.length_of = length_of  # the entry that has a token for each position
        # a sample's first label is no target: the token before it belongs to another sample
        self.masks_first = masks_first
        self.multiple_of = multiple_of or 1  # rows are filled up to a multiple of so many tokens
        # fills that entry; what else there is is filled with 0, labels so that no loss counts them
        self._fill = {length_of: pad_token_id, "labels": IGNORE_INDEX}

    def __call__(self, rows: list[list[Item]]) -> Batch:
        items = [item for row in rows for item in row]
        given = dict(self.data_collator(items))
        lengths = [len(item[self.length_of]) for item in items]
        tokens = {name: _without_padding(name, value, lengths, given.get(MASK)) for name, value in given.items()}
        tokens.pop(MASK, None)
        tokens.pop("position_ids", None)
        if self.masks_first and "labels" in tokens:
            tokens["labels"] = [_first_masked(labels) for labels in tokens["labels"]]
        counts = [len(row) for row in rows]
        bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
        row_lengths = [lengths[start:stop] for start, stop in itertools.pairwise(bounds)]
        if self.layout.form == "flat":
            return _flat(tokens, lengths, self.layout)
        width = -(-max(map(sum, row_lengths)) // self.multiple_of) * self.multiple_of
        batch = {
            name: torch.stack(
                [_row(values[a:b], width, self._fill.get(name, 0)) for a, b in itertools.pairwise(bounds)]
            )
            for name, values in tokens.items()
        }
        return batch | _told(row_lengths, width, self.layout)


def as_tensors(items: list[Item]) -> Batch:
    """The collator for users who bring none: entries that have a value for each token, as they are."""
    return {name: [torch.as_tensor(item[name]) for item in items] for name in items[0]}


def _without_padding(name: str, value: Any, lengths: Sequence[int], mask: object) -> list[torch.Tensor]:
    """An entry of a batch by sample, its padding taken off."""
    if len(value) != len(lengths) or any(part.ndim != 1 for part in value):
        _refuse(name)
    if all(len(part) == length for part, length in zip(value, lengths, strict=True)):
        return list(value)
    if not isinstance(mask, torch.Tensor):  # without one, padding is what lies beyond a sample's end
        if any(len(part) < length for part, length in zip(value, lengths, strict=True)):
            _refuse(name)
        return [part[:length] for part, length in zip(value, lengths, strict=True)]
    if value.shape != mask.shape or mask.sum(1).tolist() != list(lengths):
        _refuse(name)
    return [part[shown] for part, shown in zip(value, mask.bool(), strict=True)]


def _refuse(name: str) -> None:
    raise DataError(
        f"packing puts tokens of several samples into a row, and the collator's {name!r} does not have one value for "
        "each token. Use a collator that returns an entry as long as the sample for each sample, or train without "
        "packing: max_tokens_per_batch saves padding, too."
    )


def _first_masked(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[:1] = IGNORE_INDEX
    return labels


def _row(parts: Sequence[torch.Tensor], width: int, fill: int) -> torch.Tensor:
    used = torch.cat(list(parts))
    return torch.nn.functional.pad(used, (0, width - len(used)), value=fill)


def _told(row_lengths: Sequence[Sequence[int]], width: int, layout: PackingLayout) -> Batch:
    told: Batch = {}
    if layout.first_position is not None:
        told["position_ids"] = torch.stack([_positions(row, width, layout.first_position) for row in row_lengths])
    if layout.form == "blocks":
        told[MASK] = _blocks(row_lengths, width, layout)
    return told


def _positions(lengths: Sequence[int], width: int, first: int) -> torch.Tensor:
    """Position ids of a row. Padding repeats one id that does not continue the last sample: see `num_real_tokens`."""
    parts = [torch.arange(first, first + length) for length in lengths]
    padding = first + (2 if lengths[-1] == 1 else 1)
    return torch.cat([*parts, torch.full((width - sum(lengths),), padding)])


def _blocks(row_lengths: Sequence[Sequence[int]], width: int, layout: PackingLayout) -> torch.Tensor:
    owners = torch.stack(
        [
            torch.repeat_interleave(torch.arange(len(row) + 1), torch.tensor([*row, width - sum(row)]))
            for row in row_lengths
        ]
    )
    seen = owners[:, None, :, None] == owners[:, None, None, :]
    if layout.causal:
        seen &= torch.ones(width, width, dtype=torch.bool).tril()
    if layout.additive is None:
        return seen
    hidden = torch.finfo(layout.additive).min
    return torch.zeros(seen.shape, dtype=layout.additive).masked_fill_(~seen, hidden)


def _flat(tokens: Mapping[str, Sequence[torch.Tensor]], lengths: Sequence[int], layout: PackingLayout) -> Batch:
    """One row without padding; attention kernels take the bounds of the samples."""
    batch: Batch = {name: torch.cat(list(parts))[None] for name, parts in tokens.items()}
    if layout.first_position is not None:
        batch["position_ids"] = _positions(lengths, sum(lengths), layout.first_position)[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return batch | {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds.clone(),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
