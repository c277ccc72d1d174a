"""`trainwright export`: chooses the checkpoint of a run to export; averaged weights; merged adapters."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from trainwright._types import TRAINER_STATE_NAME
from trainwright.capabilities.averages.saved import read_average
from trainwright.checkpoint.manifest import find_problem
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.weights import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_NAME,
    export_model,
    make_pretrained,
    read_file,
    save_file,
    save_weights,
    use_umask,
    weight_files,
)
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointError, needs_package
from trainwright.state.trainer_state import TrainerState
from trainwright.support.door import read_json

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"


def chosen(folder: Path) -> tuple[Path, str]:
    """Returns the directory of the model to export, and the reason for the choice, for the console.

    A directory with a model is used as it is. An unfinished run has none: its best checkpoint is used if it recorded
    one, otherwise the newest intact checkpoint.
    """
    has_adapter = any((folder / name).is_file() for name in ADAPTER_FILES)
    if not folder.is_dir() or weight_files(folder) or has_adapter or sharded_state.has_weights(folder):
        return folder, ""
    checkpoint, why = chosen_checkpoint(folder)
    return checkpoint, f"{why}, since the run did not end" if why else ""


def chosen_checkpoint(folder: Path) -> tuple[Path, str]:
    """Returns the best checkpoint of a run, or the newest intact one, and which of the two it is.

    A directory without checkpoints is returned unchanged, with an empty text.
    """
    newest = CheckpointStore(folder).latest() if folder.is_dir() else None
    if newest is None:
        return folder, ""
    state = newest.state if (newest.path / TRAINER_STATE_NAME).is_file() else TrainerState()
    best = folder / Path(state.best_model_checkpoint or "").name
    if best != folder and best.is_dir() and find_problem(best) is None:
        return best, f"the best checkpoint (metric {state.best_metric:.4g})"
    return newest.path, "the newest checkpoint"


def export_average(checkpoint: Path, folder: Path) -> list[Path]:
    """Writes the model of a checkpoint with its averaged weights, in the dtypes of the trained ones.

    Args:
        checkpoint: directory of a checkpoint that a run with `average` wrote.
        folder: directory to write; it must be empty, or missing.

    Raises:
        CheckpointError: there is no average, or it does not fit the weights.
    """
    average = read_average(checkpoint)
    export_model(checkpoint, folder, parts=sharded_state)
    left = set(average)
    for file in sorted((*folder.rglob(SAFE_WEIGHTS_NAME), *folder.rglob(ADAPTER_WEIGHTS_NAME))):
        adapter = None if file.name == SAFE_WEIGHTS_NAME else name_of_adapter(file.parent, folder)
        by_key = {name if adapter is None else key_in_adapter(name, adapter): name for name in average}
        weights = read_file(file)
        for key in weights.keys() & by_key.keys():
            weights[key] = average[by_key[key]].to(weights[key].dtype)
            left.discard(by_key[key])
        save_file(weights, file)
    if left:
        _load_into_model(average, folder)
    use_umask(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def name_of_adapter(place: Path, folder: Path) -> str:
    """Returns the name of the adapter with a file in a subdirectory of `folder`; peft writes the default there."""
    return "default" if place == folder else place.name


def key_in_adapter(name: str, adapter: str) -> str:
    """Returns the name of a model parameter in peft's file, which omits the adapter's name."""
    return re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", "", name.replace("modules_to_save.", ""))


def _load_into_model(average: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes the model again with the average, if the names in the file differ from the parameters' names."""
    config = folder / CONFIG_NAME
    classes = read_json(config, max_bytes=1 << 20).get("architectures") if config.is_file() else None
    problem = f"The weights in {folder} have other names than their average ({next(iter(average))}, ...)."
    if not classes:
        raise CheckpointError(problem)
    model = make_pretrained(folder, classes[0], attention=None)
    if model.load_state_dict(average, strict=False).unexpected_keys:
        raise CheckpointError(problem)
    save_weights(model, folder)


def merge(checkpoint: Path, folder: Path) -> list[Path]:
    """Writes the model of a checkpoint with its adapter merged into its weights.

    Args:
        checkpoint: directory with the adapter; it, or the run that it is of, has the configuration of the model.
        folder: directory to write; it must be empty, or missing.

    Raises:
        CheckpointError: there is no adapter, or the model that it belongs to cannot be loaded.
    """
    with needs_package("--merge needs the package peft: pip install peft"):
        from peft import PeftModel
    import transformers
    from safetensors import SafetensorError

    from trainwright.cli.tasks.models import quiet_transformers

    if not any((checkpoint / name).is_file() for name in ADAPTER_FILES):
        raise CheckpointError(f"{checkpoint} has no adapter, so there is nothing to merge. Omit --merge.")
    described = next((one for one in (checkpoint, checkpoint.absolute().parent) if (one / CONFIG_NAME).is_file()), None)
    base_name = read_json(checkpoint / ADAPTER_CONFIG_NAME, max_bytes=1 << 20)["base_model_name_or_path"]
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers about files read by peft
        try:
            config: Any = transformers.AutoConfig.from_pretrained(described or base_name, trust_remote_code=False)
            config.__dict__.pop("quantization_config", None)
            cls = getattr(transformers, (config.architectures or ["AutoModel"])[0])
            base = cls.from_pretrained(base_name, config=config, dtype=config.dtype or "auto", trust_remote_code=False)
            merged = PeftModel.from_pretrained(base, checkpoint).merge_and_unload()
        except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint}: the adapter cannot be merged: {error}") from error
        export_model(checkpoint, folder, parts=sharded_state)  # also refuses a folder that is not empty, or damage
        for name in (*ADAPTER_FILES, ADAPTER_CONFIG_NAME):
            (folder / name).unlink(missing_ok=True)
        merged.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())
