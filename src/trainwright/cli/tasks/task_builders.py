"""Tasks: a label or a number for a text, tags for words (each at its first token), language models, image labels.

Images are files, images of a dataset, or rows of pixels; they are opened on demand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor

from trainwright._types import IGNORE_INDEX, JSONObject, counted
from trainwright.cli.recipe.schema import ImagePart
from trainwright.cli.tasks import task_metrics
from trainwright.cli.tasks.chat import AnswerMask, end_tokens, use_template
from trainwright.cli.tasks.class_weights import find_weighted_loss
from trainwright.cli.tasks.conversations import ConversationError
from trainwright.cli.tasks.models import load_config, load_model, load_tokenizer, max_length
from trainwright.cli.tasks.multi_label import PROBLEM_TYPE
from trainwright.cli.tasks.source import Labels, ModelConfig, Row, Rows, TaskSource, find_labels, is_range, texts
from trainwright.cli.tasks.task_objects import (
    ROW_OF_SAMPLE,
    Columns,
    TaskObjects,
    make_origin,
    note_cut_texts,
    pieces,
    shown,
    text_objects,
    text_parts,
)
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.data.row_names import RowOrigin
from trainwright.errors import DataError, needs_package
from trainwright.support.findings import Finding

if TYPE_CHECKING:
    from PIL import Image

Pixels: TypeAlias = "npt.NDArray[np.float32]"


def text_classification(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a text classification."""
    labels = find_labels(material, "label")
    if material.has_lists:
        _refuse_weights(material)
        return _text_pair_objects(
            material,
            args,
            {**labels.for_config, "problem_type": PROBLEM_TYPE},
            labels.mark,
            task_metrics.score_label_sets,
            f"any of the labels: {shown(labels.names)}",
        )
    settings = {**labels.for_config, "problem_type": "single_label_classification"}
    objects = _text_pair_objects(
        material, args, settings, labels.find, task_metrics.accuracy_and_f1, f"labels: {shown(labels.names)}"
    )
    return replace(objects, compute_loss=find_weighted_loss(material, labels, "label"))


def _refuse_weights(material: TaskSource) -> None:
    if material.recipe.data.class_weights is not None:
        material.wrong("weights are for rows with one label each; these have lists.", "data", "class_weights")


def regression(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a regression."""
    numbers = [_number(material, cell) for _, rows in material.parts for cell in material.column(rows, "label")]
    about = f"numbers from {min(numbers):g} to {max(numbers):g}"
    settings = {"num_labels": 1, "problem_type": "regression"}
    return _text_pair_objects(material, args, settings, float, task_metrics.score_numbers, about)


def _text_pair_objects(
    material: TaskSource,
    args: TrainingArguments,
    settings: JSONObject,
    label: Callable[[Any], float | list[float]],
    scores: task_metrics.Scorer,
    about: str,
) -> TaskObjects:
    roles = ["text", *(["text_pair"] if material.has("text_pair") else [])]
    tokenizer, config, length = text_parts(material, args, roles, **settings)
    for role in roles:
        note_cut_texts(material, role, length)
    names = [material.recipe.column(role) for role in roles]
    label_column = material.recipe.column("label")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(*(texts(columns[name]) for name in names), truncation=True, max_length=length)
        return {**found, "labels": [label(cell) for cell in columns[label_column]]}

    if config.pad_token_id is None:  # such a model uses its last non-padding token for the answer
        config.pad_token_id = tokenizer.pad_token_id
    return text_objects(material, config, tokenizer, encode, compute_metrics=scores, about=about)


def _number(material: TaskSource, cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        column = material.recipe.column("label")
        material.wrong(f"{cell!r} in the column {column!r} is not a number.", "data", "columns", "label")
    return number


def token_classification(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a token classification."""
    _check_lengths(material)
    labels = find_labels(material, "tags")
    tokenizer, config, length = text_parts(material, args, ["words"], **labels.for_config)
    if not tokenizer.is_fast:
        said = "this tokenizer cannot map tokens to words; use a fast tokenizer."
        material.wrong(said, "model", "tokenizer")
    note_cut_texts(material, "words", length)
    words, tags = (material.recipe.column(role) for role in ("words", "tags"))

    def encode(columns: Columns) -> Columns:
        rows = [[str(word) for word in row] for row in columns[words]]
        found = tokenizer(rows, is_split_into_words=True, truncation=True, max_length=length)
        of_rows = []
        for number, row in enumerate(columns[tags]):
            word_of = found.word_ids(number)
            is_first = [word is not None and (at == 0 or word_of[at - 1] != word) for at, word in enumerate(word_of)]
            marked = zip(word_of, is_first, strict=True)
            of_rows.append([labels.find(row[word]) if first else IGNORE_INDEX for word, first in marked])
        return {**found, "labels": of_rows}

    collator = DataCollatorForTokenClassification(tokenizer)
    about = f"tags: {shown(labels.names)}"
    scores = {"compute_metrics": task_metrics.span_scorer(labels.names), "preprocess_logits": task_metrics.best_guess}
    return text_objects(material, config, tokenizer, encode, data_collator=collator, about=about, **scores)


def _check_lengths(material: TaskSource) -> None:
    for _, rows in material.parts:
        for words, tags in zip(material.column(rows, "words"), material.column(rows, "tags"), strict=True):
            if not isinstance(words, (list, tuple)) or not isinstance(tags, (list, tuple)):
                material.wrong("words and tags must be lists; these are not.", "data", "columns")
            if len(words) != len(tags):
                said = f"{counted(len(words), 'word')} with {counted(len(tags), 'tag')}"
                material.wrong(f"a row has {said}: {' '.join(map(str, words[:8]))} ...", "data", "columns")


def causal_lm(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a causal model: samples are texts with an end token; long texts become several samples."""
    tokenizer, config, length = text_parts(material, args, ["text"])
    column = material.recipe.column("text")
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def encode(columns: Columns) -> Columns:
        rows = tokenizer(texts(columns[column]), add_special_tokens=False, verbose=False)["input_ids"]
        cut = [pieces([*row, *end], length) for row in rows]
        return {
            "input_ids": [piece for found in cut for piece in found],
            ROW_OF_SAMPLE: [row for row, found in enumerate(cut) for _ in found],
        }

    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    about = f"{len(tokenizer)} tokens in the vocabulary"
    return text_objects(material, config, tokenizer, encode, data_collator=collator, about=about)


def chat(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a chat: samples are conversations in which only the answers carry loss."""
    shape = material.shape
    assert shape is not None  # found by load()

    def corpus() -> Iterator[str]:
        return (str(message["content"]) for row in material.train for message in shape.messages(row))

    tokenizer = load_tokenizer(material, args, corpus)
    num_added = use_template(material, tokenizer)
    config = load_config(material, tokenizer)
    length = max_length(material, tokenizer, config)
    mask = AnswerMask(tokenizer, everything=material.recipe.data.loss_on == "all")

    def encode(columns: Columns) -> Columns:
        names = list(shape.columns.values())
        rows = [dict(zip(names, cells, strict=True)) for cells in zip(*(columns[name] for name in names), strict=True)]
        try:
            found = [mask(shape.messages(row)) for row in rows]
        except ConversationError as error:
            material.wrong(f"{error}.", "data", "columns")
        cut = [{name: ids[:length] for name, ids in row.items()} for row in found]
        kept = [number for number, row in enumerate(cut) if any(label != IGNORE_INDEX for label in row["labels"][1:])]
        entries = {name: [cut[number][name] for number in kept] for name in ("input_ids", "labels")}
        return {**entries, ROW_OF_SAMPLE: kept}

    collator = DataCollatorForTokenClassification(tokenizer)
    objects = text_objects(material, config, tokenizer, encode, data_collator=collator)
    model = cast(PreTrainedModel, objects.model)
    embeddings: Any = model.get_input_embeddings()
    if num_added and embeddings.num_embeddings < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer))
    generation: Any = model.generation_config
    generation.eos_token_id = end_tokens(tokenizer)
    generation.pad_token_id = tokenizer.pad_token_id
    labels = [label for row in itertools.islice(objects.train, 1000) for label in row["labels"]]
    share = 1 - labels.count(IGNORE_INDEX) / len(labels)
    left = len(material.train) - len(objects.train)
    if left:
        material.found.append(
            Finding(
                "warning",
                f"{counted(left, 'conversation')} without an answer in the first {length} tokens: excluded.",
                check="answers",
                entry="data.max_length",
            )
        )
    names = list(shape.columns.values())
    where = f"the column{'s' * (len(names) > 1)} {', '.join(names)}"
    return replace(objects, about=f"conversations in {where}, loss on {share:.0%} of the tokens")


def masked_lm(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a masked model: new tokens are masked each time a sample is read."""
    tokenizer, config, length = text_parts(material, args, ["text"])
    if tokenizer.mask_token is None:
        material.wrong("this tokenizer has no mask_token.", "model", "tokenizer")
    column = material.recipe.column("text")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[column]), truncation=True, max_length=length, return_overflowing_tokens=True)
        row_of = found.get(ROW_OF_SAMPLE, range(len(columns[column])))
        return {**{name: list(found[name]) for name in ("input_ids", "attention_mask")}, ROW_OF_SAMPLE: list(row_of)}

    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=material.recipe.data.mask_share)
    scores = {"compute_metrics": task_metrics.guessed_tokens, "preprocess_logits": task_metrics.best_guess}
    about = f"{len(tokenizer)} tokens in the vocabulary"
    return text_objects(material, config, tokenizer, encode, data_collator=collator, about=about, **scores)


def seq2seq(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a sequence-to-sequence model, such as a translation."""
    tokenizer, config, source_length = text_parts(material, args, ["source", "target"], begins=False)
    target_length = max_length(material, tokenizer, config, name="max_target_length")
    note_cut_texts(material, "source", source_length)
    note_cut_texts(material, "target", target_length, setting="max_target_length")
    source, target = (material.recipe.column(role) for role in ("source", "target"))

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[source]), truncation=True, max_length=source_length)
        labels = tokenizer(text_target=texts(columns[target]), truncation=True, max_length=target_length)["input_ids"]
        return {**{name: found[name] for name in ("input_ids", "attention_mask")}, "labels": labels}

    scores = task_metrics.exact_match if cast(Seq2SeqTrainingArguments, args).predict_with_generate else None
    about = f"{len(tokenizer)} tokens in the vocabulary"
    objects = text_objects(material, config, tokenizer, encode, compute_metrics=scores, about=about)
    return replace(objects, data_collator=DataCollatorForSeq2Seq(tokenizer, model=objects.model))


class Images:
    """Dataset of pixels and labels."""

    def __init__(
        self, rows: Rows, origin: RowOrigin, image: Callable[[Row], Pixels], label_column: str, labels: Labels
    ) -> None:
        self._rows = rows
        self.origin = origin
        self._image = image
        self._label_column = label_column
        self._labels = labels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> JSONObject:
        row = self._rows[int(index)]
        cell = row[self._label_column]
        labels = (
            np.asarray(self._labels.mark(cell), dtype=np.float32) if isinstance(cell, list) else self._labels.find(cell)
        )
        return {"pixel_values": self._image(row), "labels": labels}


def image_classification(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of an image classification."""
    labels = find_labels(material, "label")
    if material.has_lists:
        _refuse_weights(material)
    kind: JSONObject = {"problem_type": PROBLEM_TYPE} if material.has_lists else {}
    config = load_config(material, None, **labels.for_config, **kind)
    processor = image_processor(material)
    label_column = material.recipe.column("label")
    reader = image_reader(material, processor, config)
    parts = {
        name: Images(rows, make_origin(material, rows), reader, label_column, labels) for name, rows in material.parts
    }
    try:
        parts["train"][0]
    except (OSError, ValueError, TypeError, KeyError) as error:
        material.wrong(f"the first image cannot be read: {error}", "data", "columns", "image")
    return TaskObjects(
        model=load_model(material, config),
        train=parts["train"],
        eval=parts.get("eval"),
        processing_class=processor,
        compute_metrics=task_metrics.score_label_sets if material.has_lists else task_metrics.accuracy_and_f1,
        compute_loss=find_weighted_loss(material, labels, "label"),
        about=f"labels: {shown(labels.names)}",
    )


def image_reader(
    material: TaskSource, processor: BaseImageProcessor | None, config: ModelConfig
) -> Callable[[Row], Pixels]:
    """Returns the function that makes pixels from a row."""
    column = material.recipe.column("image")
    if is_range(column):
        return _make_pixel_reader(material, column, config)
    return _make_file_reader(material, column, processor, config)


def image_processor(material: TaskSource) -> BaseImageProcessor | None:
    """Loads the model's image processor; None for a model from scratch."""
    import transformers

    kind: Any = transformers.AutoImageProcessor
    model = material.recipe.model
    where = model.tokenizer or (None if model.from_scratch else model.path)
    if where is None:
        return None
    try:
        found: BaseImageProcessor = kind.from_pretrained(where, revision=model.revision, trust_remote_code=False)
        return found
    except (OSError, ValueError, ImportError):
        if model.tokenizer is not None:
            material.wrong("no image processor can be loaded from there.", "model", "tokenizer")
        return None


@dataclass(frozen=True, kw_only=True)
class PixelReader:
    """Makes pixels from columns of numbers, row by row of the image. Can be pickled, for processes that read data."""

    names: Sequence[str]
    height: int
    width: int
    channels: int
    max_value: float

    def __call__(self, row: Row) -> Pixels:
        """Returns the pixels of a row."""
        pixels = np.asarray([float(row[name]) for name in self.names], dtype=np.float32)
        return scaled(pixels.reshape(self.height, self.width, self.channels), self.max_value)


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Makes pixels from paths, relative to `base`, or from images of a dataset. Can be pickled.

    Without a `processor` of the model, images are resized to `height` and `width`.
    """

    column: str
    base: Path
    processor: Any  # of transformers: each kind has its own class
    height: int
    width: int
    channels: int
    max_value: float

    def __call__(self, row: Row) -> Pixels:
        """Returns the pixels of a row."""
        image = opened(row[self.column], self.base)
        if self.processor is not None:
            values: Pixels = self.processor(image.convert("RGB"), return_tensors="np")["pixel_values"][0]
            return values
        image = image.convert("L" if self.channels == 1 else "RGB").resize((self.width, self.height))
        pixels = np.asarray(image, dtype=np.float32).reshape(self.height, self.width, self.channels)
        return scaled(pixels, self.max_value)


def _make_pixel_reader(material: TaskSource, column: str, config: ModelConfig) -> PixelReader:
    """Returns a reader of the columns in a range; RecipeError if they do not make an image."""
    part = material.recipe.data.image
    height, width = _size(part, config)
    first, _, last = column.partition("-")
    names = [str(number) for number in range(int(first), int(last) + 1)]
    if len(names) != part.channels * height * width:
        material.wrong(
            f"{counted(len(names), 'column')} cannot be {part.channels} x {height} x {width} (data.image).",
            "data",
            "columns",
            "image",
        )
    return PixelReader(names=names, height=height, width=width, channels=part.channels, max_value=part.max_value)


def _make_file_reader(
    material: TaskSource, column: str, processor: BaseImageProcessor | None, config: ModelConfig
) -> ImageReader:
    """Returns a reader of paths (relative ones are relative to the recipe's files), or of images of a dataset."""
    part = material.recipe.data.image
    named = material.recipe.data.train
    height, width = _size(part, config)
    return ImageReader(
        column=column,
        base=Path(named[0]).parent if isinstance(named, list) and named else Path(),
        processor=processor,
        height=height,
        width=width,
        channels=part.channels,
        max_value=part.max_value,
    )


def opened(cell: object, base: Path) -> Image.Image:
    """Opens an image from a path relative to `base`, or returns a cell that is a PIL image; DataError otherwise."""
    with needs_package("Image files need the package pillow: pip install pillow"):
        from PIL import Image
    if isinstance(cell, Image.Image):
        return cell
    if not isinstance(cell, str):
        raise DataError(f"{cell!r} is neither a path nor an image.")
    path = base / cell
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file, so not an image.")
    return Image.open(path)


def scaled(pixels: Pixels, max_value: float) -> Pixels:
    """Converts (rows, columns, channels) of 0 to `max_value` into (channels, rows, columns) of -1 to 1."""
    moved: Pixels = (pixels / (max_value / 2) - 1).transpose(2, 0, 1)
    return moved


def _size(part: ImagePart, config: ModelConfig) -> tuple[int, int]:
    own = getattr(config, "image_size", None) or 224
    height = part.height or (own if isinstance(own, int) else own[0])
    return height, part.width or (height if isinstance(own, int) else own[1])
