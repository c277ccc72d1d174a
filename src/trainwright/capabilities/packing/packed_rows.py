"""Packed rows: which samples share a row, the tensors of a batch, and the layout that keeps samples apart in a model.

Best-fit decreasing (Johnson, "Fast algorithms for bin packing", 1974; for language models Ding et al., "Fewer
truncations improve language modeling", 2024): each sample, longest first, goes to the fullest row that still has room
for it. Equal lengths are placed together, as in Krell et al., "Efficient sequence packing without cross-contamination",
2021, so that the work grows with the number of rows touched. Which lengths share a row depends on the lengths alone, so
every epoch has the same number of rows. Which sample of a length goes where, and the order of rows, are drawn for each
epoch from `seed + epoch`.

Before step 1, the model is run once on packed rows of random tokens and once on each of their samples alone. The first
layout for which all logits agree is used. If there is none, the samples would see each other, and packing is refused.
There is no list of supported models: this test decides.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import pad

from trainwright._types import IGNORE_INDEX, Batch, DatasetLike, Item, output_logits
from trainwright.capabilities.packing.document_attention import (
    HALF,
    can_attend_by_document,
    make_document_ends,
    restore_attention,
    use_document_attention,
)
from trainwright.data import length_sampler
from trainwright.data.batcher import Batcher
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import BatchedDataset, BatchOrder, Lengths, check_lengths, fetch_items
from trainwright.errors import DataError, ModelError
from trainwright.support.model_modes import evaluation_mode

Piece = tuple[int, int, int]  # (index of a sample, first token, end token), end exclusive
Row = list[Piece]
CURE = "Raise packing_length, truncate the samples, or set packing_overflow='split'."
MASK = "attention_mask"
# Difference in logits due to rounding, relative to the largest logit.
ROUNDING = {torch.float32: 5e-5, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 6e-2}
NUM_COMPARED = 4096  # logits of each token
ROUNDING_ON_A_GPU = 5e-3  # for float32, which may use TF32 for products


class PackedOrder(BatchOrder):
    """Batches of rows; a row is a list of pieces of samples; a batch of one process has `rows_per_batch` rows.

    A sample longer than a row is split with `splits_long`, otherwise it is a DataError, as is an empty one. `length_of`
    is the entry of a sample that these lengths belong to.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Lengths,
        row_length: int,
        rows_per_batch: int,
        *,
        seed: int,
        splits_long: bool = False,
        drop_last: bool = False,
        length_of: str = "input_ids",
        batcher: Batcher | None = None,
    ) -> None:
        super().__init__()
        self.batcher = batcher
        longest = np.iinfo(np.int64).max if splits_long else row_length
        checked = check_lengths(lengths, longest, setting="packing_length", cure=CURE)
        self.seed = seed
        self.num_samples = len(checked)
        self.unit = f"packing best_fit of {rows_per_batch} rows of {row_length}"
        self.packed_input = length_of
        self._pieces = _cut(checked, row_length)
        self._lengths = self._pieces[:, 2] - self._pieces[:, 1]
        self._row_of = best_fit_decreasing(np.sort(self._lengths)[::-1].tolist(), row_length)
        self._by_row = np.argsort(self._row_of, kind="stable")
        self._bounds = np.searchsorted(self._row_of[self._by_row], np.arange(self.num_rows + 1))
        self._rows_per_batch = rows_per_batch
        self._drop_last = drop_last
        self._splits_long = splits_long

    @property
    def num_rows(self) -> int:
        return int(self._row_of.max()) + 1 if len(self._row_of) else 0

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self._rows_per_batch)
        return full + int(rest > 0 and not self._drop_last)

    def indices(self, epoch: int) -> Iterable[list[Row]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drawn = torch.randperm(len(self._pieces), generator=generator).numpy()
        placed = drawn[np.argsort(-self._lengths[drawn], kind="stable")][self._by_row]
        rows = torch.randperm(self.num_rows, generator=generator).tolist()
        for batch in range(len(self)):
            chosen = rows[batch * self._rows_per_batch : (batch + 1) * self._rows_per_batch]
            pieces = [self._pieces[placed[self._bounds[row] : self._bounds[row + 1]]] for row in chosen]
            yield [[(index, start, stop) for index, start, stop in row.tolist()] for row in pieces]

    def describe(self) -> OrderKind:
        lengths = length_sampler.lengths_digest(self._lengths)
        return {"kind": "packing", "unit": self.unit, "splits_long": self._splits_long, "lengths": lengths}

    def count_samples(self, group: Sequence[Row]) -> int:
        return sum(start == 0 for row in group for _, start, _ in row)  # a split sample counts with its first piece

    def num_tokens(self, epoch: int) -> int:
        widths = ([sum(stop - start for _, start, stop in row) for row in batch] for batch in self.indices(epoch))
        return sum(len(batch) * max(batch) for batch in widths)

    def wrap(self, dataset: DatasetLike) -> PackedDataset:
        return PackedDataset(dataset, self.packed_input, splits_long=self._splits_long)


class PackedDataset(BatchedDataset):
    """Returns the items of rows of pieces: a list of items per row, cut if a piece is not the whole sample."""

    def __init__(self, dataset: DatasetLike, length_of: str, *, splits_long: bool) -> None:
        super().__init__(dataset)
        self.length_of = length_of
        self.splits_long = splits_long

    def __getitem__(self, rows: Sequence[Row]) -> list[list[Item]]:
        items = iter(fetch_items(self.dataset, [index for row in rows for index, _, _ in row]))
        return [[self._cut(next(items), piece) for piece in row] for row in rows]

    def _cut(self, item: Item, piece: Piece) -> Item:
        index, start, stop = piece
        length = len(item[self.length_of])
        if start == 0 and stop == length:
            return item
        if stop > length or not self.splits_long:
            raise DataError(
                f"Sample {index} should have {stop} tokens, but has {length}. Correct the column of lengths "
                "(length_column_name), or remove it: then the tokens are counted."
            )
        # Other non-text entries with one value per token are cut too.
        cut = {name for name, one in item.items() if hasattr(one, "__len__") and not isinstance(one, (str, bytes))}
        return {n: one[start:stop] if n in cut and len(one) == length else one for n, one in item.items()}


def _cut(lengths: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Returns pieces (index, start, stop) of all samples, none longer than a row."""
    counts = -(-lengths // row_length)
    index = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_length
    return np.stack([index, start, np.minimum(start + row_length, lengths[index])], axis=1)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> NDArray[np.int64]:
    """Returns the row of each sample, for samples sorted longest first; a row holds `capacity` tokens."""
    row_of = np.zeros(len(lengths), dtype=np.int64)
    room: dict[int, list[int]] = {}  # free tokens -> rows with that much room
    rooms: list[int] = []  # its keys, sorted
    num_rows = position = 0
    while position < len(lengths):
        length = lengths[position]
        fit = bisect_left(rooms, length)
        if fit == len(rooms):
            free = capacity
            row = num_rows
            num_rows += 1
        else:
            free = rooms[fit]
            row = room[free].pop()
            if not room[free]:
                del room[free], rooms[fit]
        # The next sample of this length fits this row best again, until the row is too full for it.
        end = position + free // length
        while position < min(end, len(lengths)) and lengths[position] == length:
            row_of[position] = row
            position += 1
            free -= length
        if free:
            if free not in room:
                insort(rooms, free)
            room.setdefault(free, []).append(row)
    return row_of


# -- tensors of rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLayout:
    """The inputs that show a model where samples begin."""

    # "documents": the ends of samples, for attention by document; "positions": restarting position ids, from which
    # transformers makes its masks; "blocks": a mask for each pair of tokens; "flat": one row of all samples with their
    # bounds, for kernels that take them
    form: Literal["documents", "positions", "blocks", "flat"]
    causal: bool = False  # a mask also hides later tokens
    # dtype of a mask added to the scores; None: a boolean mask, True where attention is allowed
    additive: torch.dtype | None = None
    first_position: int | None = 0  # position id of a sample's first token; None if the model takes no position ids


@dataclass(eq=False)
class PackedCollator(CollatorLayer):
    """Makes a batch of rows: the items' tensors concatenated, padded on the right to the longest row."""

    data_collator: Callable[[list[Item]], Batch]  # collates the items of all rows; its padding is removed again
    layout: PackingLayout  # the inputs that show the model where samples begin
    length_of: str = "input_ids"  # the entry with a token for each position
    # padding of that entry; other entries are padded with 0, labels with a value that the loss ignores
    pad_token_id: int = 0
    masks_first: bool = False  # a sample's first label is not a target: the token before it belongs to another sample
    multiple_of: int | None = None  # rows are padded to a multiple of this number of tokens

    def __call__(self, rows: list[list[Item]]) -> Batch:
        items = [item for row in rows for item in row]
        given = dict(self.data_collator(items))
        lengths = [len(item[self.length_of]) for item in items]
        tokens = {name: _without_padding(name, value, lengths, given.get(MASK)) for name, value in given.items()}
        tokens.pop(MASK, None)
        tokens.pop("position_ids", None)
        if self.masks_first and "labels" in tokens:
            tokens["labels"] = [pad(labels[1:], (1, 0), value=IGNORE_INDEX) for labels in tokens["labels"]]
        bounds = [0, *itertools.accumulate(map(len, rows))]
        row_lengths = [lengths[start:stop] for start, stop in itertools.pairwise(bounds)]
        if self.layout.form == "flat":
            return _flat(tokens, lengths, self.layout)
        multiple = self.multiple_of or 1
        width = -(-max(map(sum, row_lengths)) // multiple) * multiple
        fill = {self.length_of: self.pad_token_id, "labels": IGNORE_INDEX}
        batch = {}
        for name, values in tokens.items():
            joined = [torch.cat(list(values[start:stop])) for start, stop in itertools.pairwise(bounds)]
            batch[name] = torch.stack([pad(row, (0, width - len(row)), value=fill.get(name, 0)) for row in joined])
        if (first := self.layout.first_position) is not None:
            batch["position_ids"] = torch.stack([_positions(row, width, first) for row in row_lengths])
        if self.layout.form == "blocks":
            batch[MASK] = _blocks(row_lengths, width, self.layout)
        if self.layout.form == "documents":
            batch[MASK] = make_document_ends(row_lengths, width)
        return batch


def as_tensors(items: list[Item]) -> Batch:
    """The default collator: entries with one value per token, unchanged."""
    return {name: [torch.as_tensor(item[name]) for item in items] for name in items[0]}


def _without_padding(name: str, value: Any, lengths: Sequence[int], mask: object) -> list[torch.Tensor]:
    """Returns an entry of a batch split by sample, without its padding."""
    if len(value) != len(lengths) or any(part.ndim != 1 for part in value):
        _refuse(name)
    pairs = list(zip(value, lengths, strict=True))
    if all(len(part) == length for part, length in pairs):
        return list(value)
    if not isinstance(mask, torch.Tensor):  # without a mask, padding is everything beyond a sample's end
        if any(len(part) < length for part, length in pairs):
            _refuse(name)
        return [part[:length] for part, length in pairs]
    if value.shape != mask.shape or mask.sum(1).tolist() != list(lengths):
        _refuse(name)
    return [part[shown] for part, shown in zip(value, mask.bool(), strict=True)]


def _refuse(name: str) -> None:
    raise DataError(
        f"packing puts tokens of several samples into a row, but the collator's {name!r} does not have one value per "
        "token. Use a collator that returns an entry as long as the sample for each sample, or train without "
        "packing: max_tokens_per_batch saves padding, too."
    )


def _positions(lengths: Sequence[int], width: int, first: int) -> torch.Tensor:
    """Returns position ids of a row.

    Padding repeats one id that does not continue the last sample (`num_real_tokens`).
    """
    parts = [torch.arange(first, first + length) for length in lengths]
    padding = first + (2 if lengths[-1] == 1 else 1)
    return torch.cat([*parts, torch.full((width - sum(lengths),), padding)])


def _blocks(row_lengths: Sequence[Sequence[int]], width: int, layout: PackingLayout) -> torch.Tensor:
    counts = [torch.tensor([*row, width - sum(row)]) for row in row_lengths]
    owners = torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in counts])
    seen = owners[:, None, :, None] == owners[:, None, None, :]
    if layout.causal:
        seen &= torch.ones(width, width, dtype=torch.bool).tril()
    if layout.additive is None:
        return seen
    hidden = torch.finfo(layout.additive).min
    return torch.zeros(seen.shape, dtype=layout.additive).masked_fill_(~seen, hidden)


def _flat(tokens: Mapping[str, Sequence[torch.Tensor]], lengths: Sequence[int], layout: PackingLayout) -> Batch:
    """Makes one row without padding; attention kernels take the bounds of the samples."""
    batch: Batch = {name: torch.cat(list(parts))[None] for name, parts in tokens.items()}
    if layout.first_position is not None:
        batch["position_ids"] = _positions(lengths, sum(lengths), layout.first_position)[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone()}
    return batch | {"max_length_q": longest, "max_length_k": longest}


# -- isolation ---------------------------------------------------------------------------------------------------------


def find_layout(
    model: nn.Module,
    *,
    row_length: int,
    num_rows: int,
    takes_positions: bool,
    length_of: str = "input_ids",
    half: torch.dtype | None = None,
    is_alone: bool = True,
) -> PackingLayout:
    """Returns the layout that keeps the samples of a row apart in this model; ModelError if there is none.

    Args:
        model: on its device; it gets attention by document if that is the layout.
        row_length: most tokens of a row.
        num_rows: rows of a batch.
        takes_positions: the model takes position ids.
        length_of: the entry with a token for each position.
        half: 16-bit type in which the run computes; None: the type of the weights.
        is_alone: one process has all of a row.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(_refusal(model, "it is an encoder-decoder, which has two sequences for each sample"))
    by_document = is_alone and can_attend_by_document(model, row_length=row_length, half=half)
    rows = _make_random_rows(model, row_length, min(num_rows, 2), length_of)
    differences = []
    with evaluation_mode(model):
        alone = [_logits_alone(model, item[length_of], length_of) for row in rows for item in row]
        for layout in _candidates(model, takes_positions, by_document=by_document):
            if layout.form == "documents":
                use_document_attention(model)
            problem = _find_problem(model, rows, alone, layout, length_of=length_of, half=half)
            if problem is None:
                return layout
            if layout.form == "documents":
                restore_attention(model)
            differences.append(f"{layout.form}: {problem}")
    found = ", ".join(dict.fromkeys(differences))
    raise ModelError(_refusal(model, f"its logits for packed and for single samples differ ({found})"))


def _logits_alone(model: nn.Module, tokens: torch.Tensor, length_of: str) -> torch.Tensor:
    try:
        return _logits(model, {length_of: tokens[None]}, tokens.numel())[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # on a GPU, flex attention has no kernel for some rows shorter than 128 tokens
        kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
        found = f"it fails on a single sample of {tokens.numel()} tokens with attn_implementation={kernel!r}"
        raise ModelError(
            _refusal(model, f"{found} ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})")
        ) from error


def _find_problem(
    model: nn.Module,
    rows: list[list[Batch]],
    alone: list[torch.Tensor],
    layout: PackingLayout,
    *,
    length_of: str,
    half: torch.dtype | None,
) -> str | None:
    """Returns how a layout fails: by an error, or by the difference of packed logits and those of `alone`."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    device = weight.device.type
    tolerance = ROUNDING.get(weight.dtype, max(ROUNDING.values()))
    trials: list[tuple[AbstractContextManager[object], float]] = [
        (nullcontext(), tolerance if device == "cpu" else max(tolerance, ROUNDING_ON_A_GPU))
    ]
    if layout.form == "documents" and device != "cpu" and half is not None and weight.dtype not in HALF:
        # Attention in 16 bits is another kernel than the one that the weights' own type took.
        trials.append((torch.autocast(device, half), ROUNDING[half]))
    scale = max(max(float(one.abs().max()) for one in alone), 1e-12)
    for precision, most in trials:
        try:
            with precision:
                packed = _logits_packed(model, rows, layout, length_of)
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            return type(error).__name__
        share = max(float((a - b).abs().max()) for a, b in zip(alone, packed, strict=True)) / scale
        if not share <= most:
            return f"{share:.1e} of the largest logit"
    return None


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"packing cannot be used with {type(model).__name__}: {reason}. Drop packing; max_tokens_per_batch saves "
        "padding with every model."
    )


def _candidates(model: nn.Module, takes_positions: bool, *, by_document: bool) -> Iterator[PackingLayout]:
    """Yields the layouts to try, cheapest first; `by_document`: attention by document is among them."""
    config = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    firsts: list[int | None] = [None]
    if takes_positions:  # some models count positions starting after the padding id
        firsts = [0, *([padding + 1] if padding is not None else [])]
    kernel = str(getattr(config, "_attn_implementation", ""))
    additive = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for first in firsts:
        if "flash" in kernel:
            yield PackingLayout(form="flat", first_position=first)
            continue
        if by_document:
            yield PackingLayout(form="documents", first_position=first)
        if first is not None:
            yield PackingLayout(form="positions", first_position=first)
        for kind in (None, additive):
            yield PackingLayout(form="blocks", additive=kind, first_position=first)
            yield PackingLayout(form="blocks", additive=kind, causal=True, first_position=first)


def _make_random_rows(model: nn.Module, row_length: int, num_rows: int, length_of: str) -> list[list[Batch]]:
    """Returns a row of a long and a short sample, to detect windowed attention too, and a row of three samples."""
    lengths = [[max(row_length - 3, 1), 2], [max(row_length // 2, 1), max(row_length // 3, 1), 1]][:num_rows]
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        raise ModelError(
            f"packing is tried on random tokens before step 1, and {type(model).__name__} has no "
            "get_input_embeddings() that tells how many there are. Write this method, or train without packing: "
            "max_tokens_per_batch saves padding too."
        ) from None
    generator = torch.Generator().manual_seed(0)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)

    def sample(length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, table.num_embeddings, (length,), generator=generator)
        tokens[tokens == padding] = (padding or 0) + 1 if (padding or 0) + 1 < table.num_embeddings else 0
        return {length_of: tokens}

    return [[sample(length) for length in row] for row in lengths]


def _logits_packed(
    model: nn.Module, rows: list[list[Batch]], layout: PackingLayout, length_of: str
) -> list[torch.Tensor]:
    batch = PackedCollator(as_tensors, layout, length_of=length_of)(rows)
    logits = _logits(model, batch, batch[length_of].shape[1])
    lengths = [[item[length_of].numel() for item in row] for row in rows]
    if layout.form == "flat":
        return list(torch.split_with_sizes(logits[0], [length for row in lengths for length in row]))
    pairs = zip(logits, lengths, strict=True)
    return [part for one, row in pairs for part in torch.split_with_sizes(one[: sum(row)], row)]


def _logits(model: nn.Module, batch: Batch, width: int) -> torch.Tensor:
    device = next(model.parameters()).device
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    # The class's own forward: during a run, the instance may have one under autocast, whose rounding would hide
    # differences.
    outputs = type(model).forward(model, **placed)
    try:
        logits = output_logits(outputs)
    except (KeyError, IndexError):
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[1] != width:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else "none"
        raise ModelError(
            _refusal(model, f"it has no logits for each token (their shape: {shape}), so a row has at most one answer")
        )
    # A part of a large vocabulary shows differences as well as all of it, and is kept for every token of a long row.
    return logits[..., :NUM_COMPARED].float().clone()
