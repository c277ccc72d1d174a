"""The collator for users who bring none: transformers' own, which pad to the longest sample of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright._types import Batch, Item, is_instance_of
from trainwright.data.columns import module_of


def default_collator(processing_class: Any, pad_to_multiple_of: int | None = None) -> Callable[[list[Item]], Batch]:
    """The collator that pads with the tokenizer or feature extractor; without one, it stacks equal shapes."""
    pads = is_instance_of(
        processing_class, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase"
    ) or is_instance_of(processing_class, "transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor")
    from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

    if pads:
        return DataCollatorWithPadding(processing_class, pad_to_multiple_of=pad_to_multiple_of)
    return default_data_collator


def draws_random_numbers(collator: Any) -> bool:
    """Returns True if a collator may draw random numbers; only those known not to are trusted."""
    while hasattr(collator, "data_collator"):  # wrappers that drop columns, unpack groups, fill rows
        collator = collator.data_collator
    name, module = getattr(collator, "__qualname__", type(collator).__qualname__), module_of(collator)
    known = {"default_data_collator", "DataCollatorWithPadding", "DefaultDataCollator", "default_collate"}
    return not (name in known and module.startswith(("transformers.", "torch.")))


def __getattr__(name: str) -> Any:
    """transformers' collators, under their own names."""
    if name == "default_data_collator" or name.startswith(("DataCollator", "DefaultDataCollator")):
        import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
