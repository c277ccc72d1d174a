"""The settings of an export beside those of the trained model, entry by entry: model, generation, tokenizer, files.

Of each file the first entry that differs is named. What an export may change is listed in `MAY_CHANGE`.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright._types import JSONObject, counted
from trainwright.checkpoint.weights import ADAPTER_WEIGHTS_NAME, GENERATION_NAME, weight_files
from trainwright.cli.tasks.export import CONFIG_NAME
from trainwright.cli.tasks.export_weights import ExportFault
from trainwright.errors import CheckpointError
from trainwright.support.door import read_json

# Entries of the two configurations, at any depth: where the file is from, what wrote it, and what is judged elsewhere
# (the class, the types of the weights, weights of few bits, a head that is tied or not).
MAY_CHANGE = frozenset(
    (
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "quantization_config",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
    )
)
# Files of tokenizers; those in JSON are compared by entries, the others by bytes.
OF_TOKENIZER = (
    "added_tokens.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
LONGEST = 60  # characters of a value that is shown
MAX_BYTES = 1 << 28  # of a file of a tokenizer


def read_model_settings(model: Any) -> dict[str, JSONObject]:
    """Returns the entries of a model's configuration and of its generation, by the names of their files."""
    generation = getattr(model, "generation_config", None)
    found = {CONFIG_NAME: model.config.to_dict()}
    return found if generation is None else {**found, GENERATION_NAME: generation.to_dict()}


def compare_settings(trained: Mapping[str, JSONObject], exported: Mapping[str, JSONObject]) -> Iterator[ExportFault]:
    """Yields a difference for each of the two files with other entries than the trained model has."""
    for name, wanted in trained.items():
        yield from _compare_entries(name, wanted, exported.get(name, {}), may_change=MAY_CHANGE)


def compare_tokenizer_files(trained: Path, exported: Path) -> Iterator[ExportFault]:
    """Yields a difference for each file of a tokenizer that is not the one that was saved with the trained model."""
    for name in OF_TOKENIZER:
        one = trained / name
        other = exported / name
        if not one.is_file() and not other.is_file():
            continue
        if not other.is_file():
            yield ExportFault(name, "is not in the export, and was saved with the trained model")
        elif not one.is_file():
            yield ExportFault(name, "was not saved with the trained model")
        elif filecmp.cmp(one, other, shallow=False):
            continue
        elif not name.endswith(".json"):
            yield ExportFault(name, "is not the file that was saved with the trained model")
        else:
            try:
                found = _by_content(read_json(other, max_bytes=MAX_BYTES))
            except (ValueError, TypeError) as error:
                yield ExportFault(name, f"cannot be read: {error}")
                continue
            yield from _compare_entries(name, _by_content(read_json(one, max_bytes=MAX_BYTES)), found)


def compare_tensor_names(
    trained: Path, exported: Path, unexpected: set[str], *, same_types: bool
) -> Iterator[ExportFault]:
    """Yields a difference for tensors in the files that the trained model lacks, and for adapters of another type.

    Args:
        trained: directory of the checkpoint.
        exported: directory of the export.
        unexpected: names in the export's files that its model does not use.
        same_types: whether the types of an adapter's weights must be the trained ones.
    """
    known = {name for file in weight_files(trained) for name in _tensors(file)}
    extra = sorted(unexpected - known)
    if extra:
        more = f", and {counted(len(extra) - 1, 'tensor')} more" if extra[1:] else ""
        yield ExportFault("model.safetensors", f"has the extra tensor {extra[0]}{more}, which the trained model lacks")
    one = _tensors(trained / ADAPTER_WEIGHTS_NAME)
    other = _tensors(exported / ADAPTER_WEIGHTS_NAME)
    for name, kind in other.items() if one else ():
        if name not in one:
            yield ExportFault(ADAPTER_WEIGHTS_NAME, f"has the tensor {name}, which the trained adapter has not")
            return
        if same_types and kind != one[name]:
            yield ExportFault(ADAPTER_WEIGHTS_NAME, f"{name} is in {kind}, trained in {one[name]}, without --dtype")
            return


def _tensors(file: Path) -> dict[str, str]:
    """Returns the types of the tensors in a file of safetensors by their names; {} without such a file."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 -- no mapping
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read as weights: {error}. Use another checkpoint.") from error


def _by_content(settings: Any) -> Any:
    """Returns the settings of a tokenizer with the added tokens by their content, so that one is named by it."""
    added = settings.get("added_tokens") if isinstance(settings, dict) else None
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        return settings
    return {**settings, "added_tokens": {str(one.get("content")): one for one in added}}


def _compare_entries(
    file: str, trained: Any, exported: Any, *, may_change: frozenset[str] = frozenset()
) -> Iterator[ExportFault]:
    one = dict(_entries(trained, may_change))
    other = dict(_entries(exported, may_change))
    apart = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    if not apart:
        return
    name = apart[0]
    is_now = f"is {_shown(other[name])}" if name in other else "is missing"
    before = f"trained with {_shown(one[name])}" if name in one else "trained without it"
    more = f" (and {counted(len(apart) - 1, 'entry')} more)" if apart[1:] else ""
    yield ExportFault(file, f"{name} {is_now}, {before}{more}")


def _entries(value: Any, may_change: frozenset[str], start: str = "") -> Iterator[tuple[str, str]]:
    """Yields the entries of nested settings: their names with dots, and their values as JSON."""
    if not isinstance(value, dict) or not value:
        yield start, json.dumps(value, default=str, ensure_ascii=False)
        return
    for name, one in value.items():
        if name not in may_change:
            yield from _entries(one, may_change, f"{start}.{name}" if start else str(name))


def _shown(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]} ..."
