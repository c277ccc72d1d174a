"""The data of the parity table: small, random, the same at every call; ragged where a collator pads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from .models import CLASSES, FEATURES, VOCAB

if TYPE_CHECKING:
    import datasets

Item = dict[str, Any]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _tokens(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(len(SPECIAL), VOCAB, (length,), generator=generator).tolist()


def texts(size: int) -> list[Item]:
    """For a classifier: token ids of one length and a label."""
    g = torch.Generator().manual_seed(5)
    return [{"input_ids": _tokens(g, 7), "labels": i * i % CLASSES} for i in range(size)]


def ragged_texts(size: int) -> list[Item]:
    """As `texts`, of 3 to 12 tokens, so that batches need padding."""
    g = torch.Generator().manual_seed(6)
    return [
        {"input_ids": (ids := _tokens(g, 3 + i * 5 % 10)), "attention_mask": [1] * len(ids), "labels": i * i % CLASSES}
        for i in range(size)
    ]


def sequences(size: int) -> list[Item]:
    """For a causal model: the labels are the input, the prompt of 0 to 3 tokens masked."""
    g = torch.Generator().manual_seed(7)
    rows = [_tokens(g, 9) for _ in range(size)]
    return [{"input_ids": ids, "labels": [-100] * (i % 4) + ids[i % 4 :]} for i, ids in enumerate(rows)]


def pairs(size: int) -> list[Item]:
    """For an encoder-decoder: the labels are the input backwards, the tail of 0 to 2 tokens masked."""
    g = torch.Generator().manual_seed(8)
    rows = [_tokens(g, 6) for _ in range(size)]
    return [{"input_ids": ids, "labels": ids[::-1][: 6 - i % 3] + [-100] * (i % 3)} for i, ids in enumerate(rows)]


def vectors(size: int) -> list[Item]:
    """For a plain module: tensors."""
    g = torch.Generator().manual_seed(9)
    return [{"x": torch.randn(FEATURES, generator=g), "labels": i * i % CLASSES} for i in range(size)]


def images(size: int) -> list[Item]:
    """For a vision model: pixels and a label."""
    g = torch.Generator().manual_seed(10)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=g), "labels": i * i % CLASSES} for i in range(size)]


class TorchDataset(Dataset[Item]):
    """Length and index, nothing else."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]


class Stream(IterableDataset[Item]):
    """No length."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


def hf_dataset(items: list[Item], **more_columns: list[Any]) -> datasets.Dataset:
    import datasets  # not everywhere: tests on a GPU need what a run needs, and nothing more

    columns = {name: [item[name] for item in items] for name in items[0]}
    return datasets.Dataset.from_dict(columns | more_columns)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(SPECIAL + tuple(f"w{i}" for i in range(VOCAB - len(SPECIAL))))}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
