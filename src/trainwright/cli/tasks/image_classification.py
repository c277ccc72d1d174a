"""One label for an image: files, images of a dataset, or rows of pixels. Images are opened when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from transformers.image_processing_utils import BaseImageProcessor

from trainwright._types import JSONObject
from trainwright.cli.recipe.schema import ImagePart
from trainwright.cli.tasks.labels import Labels, find_labels
from trainwright.cli.tasks.models import load_config, load_model
from trainwright.cli.tasks.source import ModelConfig, Row, Rows, TaskSource, is_range
from trainwright.cli.tasks.task_metrics import accuracy_and_f1
from trainwright.cli.tasks.task_objects import TaskObjects, shown
from trainwright.config.arguments import TrainingArguments
from trainwright.errors import DataError, needs_package

if TYPE_CHECKING:
    from PIL import Image

Pixels: TypeAlias = "npt.NDArray[np.float32]"


class Images:
    """Dataset of pixels and labels."""

    def __init__(self, rows: Rows, image: Callable[[Row], Pixels], label_column: str, labels: Labels) -> None:
        self._rows, self._image, self._label_column, self._labels = rows, image, label_column, labels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> JSONObject:
        row = self._rows[int(index)]
        return {"pixel_values": self._image(row), "labels": self._labels.of(row[self._label_column])}


def classification(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of an image classification."""
    labels = find_labels(material, "label")
    config = load_config(material, **labels.for_config)
    processor = _processor(material)
    column = material.recipe.column("image")
    reader = (
        _of_pixels(material, column, config) if is_range(column) else _of_files(material, column, processor, config)
    )
    label_column = material.recipe.column("label")
    parts = {name: Images(rows, reader, label_column, labels) for name, rows in material.parts}
    try:
        parts["train"][0]
    except (OSError, ValueError, TypeError, KeyError) as error:
        material.wrong(f"the first image cannot be read: {error}", "data", "columns", "image")
    return TaskObjects(
        model=load_model(material, config),
        train=parts["train"],
        eval=parts.get("eval"),
        processing_class=processor,
        compute_metrics=accuracy_and_f1,
        about=f"labels: {shown(labels.names)}",
    )


def _processor(material: TaskSource) -> BaseImageProcessor | None:
    """Loads the model's image processor; None for a model from scratch."""
    import transformers

    kind: Any = transformers.AutoImageProcessor
    model = material.recipe.model
    where = model.tokenizer or (None if model.from_scratch else model.path)
    if where is None:
        return None
    try:
        found: BaseImageProcessor = kind.from_pretrained(where, revision=model.revision)
        return found
    except (OSError, ValueError, ImportError):
        if model.tokenizer is not None:
            material.wrong("no image processor can be loaded from there.", "model", "tokenizer")
        return None


def _of_pixels(material: TaskSource, column: str, config: ModelConfig) -> Callable[[Row], Pixels]:
    """Returns a reader of columns of numbers, row by row of the image."""
    part = material.recipe.data.image
    height, width = _size(part, config)
    first, _, last = column.partition("-")
    names = [str(number) for number in range(int(first), int(last) + 1)]
    if len(names) != part.channels * height * width:
        material.wrong(f"{len(names)} columns are not {part.channels} x {height} x {width} (data.image).",
                       "data", "columns", "image")  # fmt: skip

    def read(row: Row) -> Pixels:
        pixels = np.asarray([float(row[name]) for name in names], dtype=np.float32)
        return scaled(pixels.reshape(height, width, part.channels), part.max_value)

    return read


def _of_files(
    material: TaskSource, column: str, processor: BaseImageProcessor | None, config: ModelConfig
) -> Callable[[Row], Pixels]:
    """Returns a reader of paths (relative ones beside the recipe's files), or of images of a dataset."""
    part = material.recipe.data.image
    named = material.recipe.data.train
    base = Path(named[0]).parent if isinstance(named, list) and named else Path()

    def read(row: Row) -> Pixels:
        image = opened(row[column], base)
        if processor is not None:
            values: Pixels = processor(image.convert("RGB"), return_tensors="np")["pixel_values"][0]
            return values
        height, width = _size(part, config)
        image = image.convert("L" if part.channels == 1 else "RGB").resize((width, height))
        pixels = np.asarray(image, dtype=np.float32).reshape(height, width, part.channels)
        return scaled(pixels, part.max_value)

    return read


def opened(cell: object, base: Path) -> Image.Image:
    """Opens an image of PIL from a path relative to `base`, or returns a cell that is one; DataError: it is neither."""
    with needs_package("Image files need the package pillow: pip install pillow"):
        from PIL import Image
    if isinstance(cell, Image.Image):
        return cell
    if not isinstance(cell, str):
        raise DataError(f"{cell!r} is neither a path nor an image.")
    return Image.open(base / cell)


def scaled(pixels: Pixels, max_value: float) -> Pixels:
    """Converts (rows, columns, channels) of 0 to `max_value` into (channels, rows, columns) of -1 to 1."""
    moved: Pixels = (pixels / (max_value / 2) - 1).transpose(2, 0, 1)
    return moved


def _size(part: ImagePart, config: ModelConfig) -> tuple[int, int]:
    own = getattr(config, "image_size", None) or 224
    height = part.height or (own if isinstance(own, int) else own[0])
    return height, part.width or (height if isinstance(own, int) else own[1])
