"""Columns of the data that reach the model: the arguments of `forward`. Other columns are dropped, with a log line.

The user's own collator gets each item as a `Sample`: iterating over it yields the model's columns, and the others are
available by name. So a collator that treats all entries alike works as under the original, which drops the other
columns, and a collator that reads a column of its own finds it. Columns of a `datasets.Dataset` are not read until they
are asked for.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import Dataset

from trainwright._types import Batch, DatasetLike, Item, is_instance_of, optional_class
from trainwright.config.fields import get_value
from trainwright.data.collator_layers import innermost
from trainwright.data.sources import IndexedSources
from trainwright.errors import DataError, did_you_mean
from trainwright.support.counterparts import Counterpart
from trainwright.support.replaced import current

module_logger = logging.getLogger(__name__)


def is_columnar(dataset: object) -> bool:
    """Returns True for a `datasets.Dataset`, whose columns can be removed before anything is read."""
    cls = optional_class("datasets", "Dataset")
    return cls is not None and isinstance(dataset, cls)


def named_columns(trainer: object, collator: object) -> dict[str, str]:
    """Returns the columns named by a trainer (`columns`) and a collator (`required_columns`), each with its origin."""
    named: dict[str, str] = {}
    for owner, attribute in ((type(trainer), "columns"), (_find_function(collator), "required_columns")):
        names = getattr(owner, attribute, ())
        who = f"{getattr(owner, '__name__', type(owner).__name__)}.{attribute}"
        if isinstance(names, str):
            raise DataError(f"{who} is the string {names!r}; write a tuple of names: ({names!r},).")
        named = {**dict.fromkeys(_as_names(names), who), **named}
    return named


def read_class_columns(trainer: object) -> tuple[str, ...]:
    """Returns the columns that a trainer's class lists; an attribute of another meaning lists none."""
    return _as_names(getattr(type(trainer), "columns", ()))


def _as_names(value: Any) -> tuple[str, ...]:  # whatever stands under the name
    is_listed = isinstance(value, Collection) and not isinstance(value, (str, Mapping))
    return tuple(value) if is_listed and all(isinstance(name, str) for name in value) else ()


def check_named(named: Mapping[str, str], found: Collection[str], description: str | None) -> None:
    """Raises DataError for the first of the `named` columns that is missing from the data."""
    for name in (name for name in named if name not in found):
        raise DataError(
            f"{named[name]} names the column {name!r}, which the {(description or 'given').lower()} data lacks: it has "
            f"{', '.join(map(str, found))}.{did_you_mean(name, found)}"
        )


def _find_function(collator: object) -> object:
    while isinstance(collator, functools.partial):
        collator = collator.func
    return collator


def is_own(collator: object) -> bool:
    """Returns True if the user wrote the collator: it may then read columns that the model does not take."""
    return find_module(_find_function(collator)).partition(".")[0] not in ("transformers", "torch", "trainwright")


def find_module(thing: object) -> str:
    """Returns the name of the module that defines a function, or the class of an object."""
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def remove_unused(
    dataset: DatasetLike, columns: Sequence[str], *, model_name: str, description: str | None, for_own: bool = False
) -> Any:
    """Returns a `datasets.Dataset` with only the columns that the model takes; DataError if it takes none.

    With `for_own`, the user's own collator can still read the other columns by name (`Sample`).
    """
    unused = [name for name in dataset.column_names if name not in columns]
    if for_own:
        if len(unused) in (0, len(dataset.column_names)):  # the collator makes the inputs from the columns as they are
            return dataset
        _say(unused, model_name, description, module_logger, for_own=True, found=dataset.column_names)
        return DatasetWithExtras(dataset, unused)
    if len(unused) == len(dataset.column_names):
        raise DataError(
            f"No column of the {description or ''} dataset ({', '.join(dataset.column_names)}) is an input of "
            f"{model_name}.forward ({', '.join(columns)}). Tokenize texts first (a chat by apply_chat_template), "
            "rename the columns, or set remove_unused_columns=False and pass a data_collator that makes the model's "
            "inputs."
        )
    _say(unused, model_name, description, module_logger, for_own=False, found=dataset.column_names)
    return dataset.remove_columns(unused) if unused else dataset


def remove_from_sources(dataset: DatasetLike, remove: Callable[..., DatasetLike], description: str) -> DatasetLike:
    """Applies `remove` to the named sources that have columns; returns any other dataset unchanged."""

    def changed(source: DatasetLike) -> DatasetLike:
        has_columns = is_columnar(source) and source.format["type"] != "custom"
        return remove(source, description=description) if has_columns else source

    return dataset.with_sources(changed) if isinstance(dataset, IndexedSources) else dataset


class RemoveColumnsCollator(Counterpart, original="transformers.trainer_utils"):
    """Drops the entries of each item that the model does not take, then calls the collator.

    The user's own collator can still read a dropped entry by name. Collators of transformers and torch cannot, since
    they would pad or stack everything they are given. A sample that is no dict is passed on as it is.

    Other attributes are those of `data_collator`: reading and setting them reaches the user's object.

    Args:
        data_collator: makes a batch from a list of items.
        signature_columns: entries that are kept.
        logger: logs once which entries were dropped.
        model_name: name of the model in that message.
        description: description of the data in that message.
        named: required columns, each with its origin; DataError at the first batch if samples lack one.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Item]], Batch],
        signature_columns: Sequence[str],
        logger: logging.Logger | None = None,
        model_name: str | None = None,
        description: str | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self.data_collator = data_collator
        self.signature_columns = signature_columns
        self.logger = logger
        self.model_name = model_name
        self.description = description
        self.message_logged = False
        self._named = named
        self._kept = frozenset(signature_columns)
        self._is_own = is_own(data_collator)

    def __call__(self, features: list[Item]) -> Batch:
        if self._named and (named := next((item for item in features if isinstance(item, Mapping)), None)) is not None:
            check_named(self._named, named, self.description)
            self._named = None
        if set(map(type, features)) == {dict} and self._kept.issuperset(
            chain.from_iterable(features)
        ):  # nothing to drop
            return self.data_collator(features)
        kept = [self._remove_columns(item) for item in features]
        if self._is_own:
            return self.data_collator(kept)
        try:
            return self.data_collator(kept)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            odd = next((item for item in features if not isinstance(item, Mapping)), features)
            if odd is features:
                raise
            raise DataError(
                f"A sample of the {(self.description or '').lower()} data is a {type(odd).__name__}, and the "
                "collator cannot make a batch of it. Let the dataset return a dict from the model's inputs to values, "
                "or pass a data_collator that makes one."
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name == "data_collator":  # not set yet, during unpickling or copying
            raise AttributeError(name)
        return getattr(self.data_collator, name)

    def __setattr__(self, name: str, value: object) -> None:
        is_ours = name in _OF_WRAPPER or "data_collator" not in vars(self)
        if not is_ours and hasattr(self.data_collator, name):
            setattr(self.data_collator, name, value)
        else:
            super().__setattr__(name, value)

    def _remove_columns(self, feature: Item) -> Item:
        if not isinstance(feature, dict) or isinstance(feature, Sample):  # or a row of a source whose columns are
            return feature
        if not self.message_logged:
            self.message_logged = True
            unused = [name for name in feature if name not in self._kept]
            name = self.model_name or "the model"
            _say(unused, name, self.description, self.logger, for_own=self._is_own, found=feature)
        taken = {name: value for name, value in feature.items() if name in self._kept}
        if not self._is_own:
            return taken
        if not taken:
            return feature  # the collator makes the inputs from the entries as they are
        return Sample(taken, {name: value for name, value in feature.items() if name not in self._kept})


# Attributes of `RemoveColumnsCollator` itself; the public ones are the original's.
_OF_WRAPPER = frozenset(
    [
        "data_collator",
        "signature_columns",
        "logger",
        "model_name",
        "description",
        "message_logged",
        "_named",
        "_kept",
        "_is_own",
    ]
)
LABELS = frozenset({"label", "label_ids", "labels"})


def _say(
    unused: Sequence[str],
    model_name: str,
    description: str | None,
    logger: logging.Logger | None,
    *,
    for_own: bool,
    found: Collection[str],
) -> None:
    """Logs the dropped columns; warns if only labels remain."""
    if not unused or logger is None:
        return
    left = [name for name in found if name not in unused]
    if not for_own and left and LABELS.issuperset(left):
        logger.warning(
            "The model gets only %s of the %s data, and no input: %s.forward does not take %s. Tokenize the text first "
            "(input_ids), or rename the columns to arguments of forward.",
            ", ".join(left),
            (description or "given").lower(),
            model_name,
            ", ".join(unused),
        )
        return
    effect = "They are dropped. Keep them for your own collator with remove_unused_columns=False."
    if for_own:
        effect = (
            "Your data_collator can read them by name; iterating over a sample does not yield "
            "them, except with remove_unused_columns=False."
        )
    data = (description or "").lower() or "given"
    logger.info(
        "%s.forward does not take these columns of the %s data: %s. %s", model_name, data, ", ".join(unused), effect
    )


# -- items for the user's own collator ----------------------------------------------------------------------------


class Sample(dict[str, object]):
    """A dict of the entries that the model takes; other entries can be read by name."""

    __slots__ = ("_others",)

    def __init__(self, taken: Mapping[str, object], others: Mapping[str, object] | _OtherColumns) -> None:
        super().__init__(taken)
        self._others = others

    def __missing__(self, name: str) -> object:
        if name not in self._others:
            raise KeyError(name)
        return self._others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def get(self, name: str, default: object = None) -> object:
        return super().get(name, default) if name not in self._others or super().__contains__(name) else self[name]

    def pop(self, name: str, *default: object) -> object:
        return super().pop(name, *default) if super().__contains__(name) or name not in self._others else self[name]

    def __reduce__(self) -> tuple[type[dict[str, object]], tuple[dict[str, object]]]:
        return dict, (dict(self),)


class _OtherColumns:
    """The other columns of one row of a `datasets.Dataset`."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Mapping[str, Any], index: int) -> None:
        self._columns = columns
        self._index = index

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> object:
        return self._columns[name][self._index][name]


class DatasetWithExtras(Dataset[Sample]):
    """A `datasets.Dataset` without the columns `names`, which are read only when asked for by name."""

    def __init__(self, dataset: DatasetLike, names: Sequence[str]) -> None:
        self.taken = dataset.remove_columns(names)
        self.others = {name: dataset.select_columns(name) for name in names}

    def __len__(self) -> int:
        return len(self.taken)

    def __getattr__(self, name: str) -> Any:
        """Returns attributes of the dataset with the model's columns."""
        if name in ("taken", "others"):  # not set yet, during unpickling or copying
            raise AttributeError(name)
        return getattr(self.taken, name)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.taken[index], _OtherColumns(self.others, index))

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        items = self.taken.__getitems__(list(indices))
        return [Sample(item, _OtherColumns(self.others, i)) for item, i in zip(items, indices, strict=True)]


# -- default collators: transformers' own
# -------------------------------------------------------------------------------


def default_collator(
    processing_class: Any, args: object = None, *, given: object = None
) -> Callable[[list[Item]], Batch] | None:
    """Returns the collator that pads with the tokenizer or feature extractor, as `args` say, or a collator that stacks.

    Returns None if a collator is `given` and transformers' collators are not loaded: then it cannot be theirs.
    """
    if given is not None and "transformers.data.data_collator" not in sys.modules:
        return None
    pads = is_instance_of(
        processing_class, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase"
    ) or is_instance_of(processing_class, "transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor")
    from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

    if pads:
        return current("DataCollatorWithPadding", DataCollatorWithPadding)(
            processing_class, pad_to_multiple_of=get_value(args, "pad_to_multiple_of")
        )
    return current("default_data_collator", default_data_collator)


def draws_random_numbers(collator: Any) -> bool:
    """Returns True if a collator may draw random numbers; only collators known not to are trusted."""
    collator = innermost(collator)
    while isinstance(collator, RemoveColumnsCollator):
        collator = collator.data_collator
    name = getattr(collator, "__qualname__", type(collator).__qualname__)
    module = find_module(collator)
    known = {"default_data_collator", "DataCollatorWithPadding", "DefaultDataCollator", "default_collate"}
    return not (name in known and module.startswith(("transformers.", "torch.")))


def __getattr__(name: str) -> Any:
    """Returns transformers' collators, by their own names."""
    if name == "default_data_collator" or name.startswith(("DataCollator", "DefaultDataCollator")):
        import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
