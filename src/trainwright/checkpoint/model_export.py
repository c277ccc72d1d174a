"""The model of a checkpoint alone: its weights in one file, and what `from_pretrained` reads beside them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch

from trainwright._types import MANIFEST_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME
from trainwright.checkpoint.manifest import find_problem
from trainwright.checkpoint.weights import (
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    read_file,
    use_umask,
    weight_files,
)
from trainwright.errors import CheckpointError, CheckpointNotFoundError

# What a model needs beside its weights: settings, vocabularies, templates, adapters.
KEPT = (".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".py")
OF_TRAINING = (MANIFEST_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME, SAFE_WEIGHTS_INDEX_NAME)
RESULTS = ("_results.json",)


class ShardedReader(Protocol):
    """Reader of checkpoints whose weights several processes wrote in parts."""

    def has_weights(self, folder: Path) -> bool: ...
    def read_weights(self, folder: Path) -> dict[str, torch.Tensor]: ...


def export_model(checkpoint: Path, folder: Path, *, parts: ShardedReader) -> list[Path]:
    """Writes the model of a checkpoint of any layout, in one file, into an empty or missing folder; returns the files.

    Raises CheckpointNotFoundError for no directory, and CheckpointError where it is damaged, has no weights, or
    `folder` has files.
    """
    if not checkpoint.is_dir():
        raise CheckpointNotFoundError(f"There is no directory {checkpoint}.")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty. Name another directory.")
    if (checkpoint / TRAINER_STATE_NAME).is_file() and (checkpoint / MANIFEST_NAME).is_file():
        problem = find_problem(checkpoint)
        if problem is not None:
            raise CheckpointError(f"{checkpoint}: {problem}. Export another checkpoint.")
    shards, adapters = weight_files(checkpoint), list(_adapters(checkpoint))
    in_parts = not shards and parts.has_weights(checkpoint)
    if not (shards or adapters or in_parts):
        raise CheckpointError(f"{checkpoint} has no weights: neither {SAFE_WEIGHTS_NAME} nor {ADAPTER_WEIGHTS_NAME}.")
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*_settings(checkpoint), *adapters]:
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    if shards:
        _merge(shards, folder / SAFE_WEIGHTS_NAME)
    elif in_parts:
        weights = parts.read_weights(checkpoint)
        safetensors.torch.save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    use_umask(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _merge(shards: list[Path], target: Path) -> None:
    is_safe = shards[0].suffix == ".safetensors"
    if len(shards) == 1 and is_safe:
        shutil.copyfile(shards[0], target)
        return
    weights = {name: tensor for shard in shards for name, tensor in read_file(shard).items()}
    if not is_safe:  # tensors of one file may share memory there
        weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, target, metadata={"format": "pt"})


def _settings(checkpoint: Path) -> Iterator[Path]:
    for path in sorted(checkpoint.iterdir()):
        is_of_training = path.name in OF_TRAINING or path.name.endswith(RESULTS)
        if path.is_file() and path.suffix in KEPT and not is_of_training:
            yield path


def _adapters(checkpoint: Path) -> Iterator[Path]:
    """Yields the adapters of the checkpoint itself, and named ones in directories below it."""
    for weights in sorted([*checkpoint.glob(ADAPTER_WEIGHTS_NAME), *checkpoint.glob(f"*/{ADAPTER_WEIGHTS_NAME}")]):
        yield weights
        if weights.parent != checkpoint and (weights.parent / "adapter_config.json").is_file():
            yield weights.parent / "adapter_config.json"
