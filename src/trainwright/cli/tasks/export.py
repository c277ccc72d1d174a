"""`trainwright export`: chooses the checkpoint of a run to export; averaged weights; merged adapters."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from trainwright._types import TRAINER_STATE_NAME, write_text
from trainwright.checkpoint.manifest import find_problem
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.weights import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_NAME,
    export_model,
    keep_generation,
    make_pretrained,
    read_file,
    save_file,
    save_weights,
    use_umask,
    weight_files,
)
from trainwright.cli.tasks.adapter import quantized
from trainwright.cli.tasks.trained_tokens import restore_tokens
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointError, needs_package
from trainwright.state.trainer_state import TrainerState
from trainwright.support.door import read_json
from trainwright.support.scratch import owner_mark, remove_left

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
TEMPLATE_NAME = "chat_template.jinja"
PARTIAL = ".partial"  # end of the name of a directory that is written
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Model: TypeAlias = Any  # a model of transformers or peft, or a layer of peft: each class has its own methods


def has_adapter(folder: Path) -> bool:
    """Returns whether a directory has the weights of an adapter."""
    return any((folder / name).is_file() for name in ADAPTER_FILES)


def chosen(folder: Path) -> tuple[Path, str]:
    """Returns the directory of the model to export, and the reason for the choice, for the console.

    A directory with a model is used as it is. An unfinished run has none: its best checkpoint is used if it recorded
    one, otherwise the newest intact checkpoint.
    """
    if not folder.is_dir() or weight_files(folder) or has_adapter(folder) or sharded_state.has_weights(folder):
        return folder, ""
    checkpoint, why = chosen_checkpoint(folder)
    return checkpoint, f"{why}, since {folder.name} itself has no model" if why else ""


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
    from trainwright.capabilities.averages.saved import read_average

    average = read_average(checkpoint)
    export_model(checkpoint, folder, parts=sharded_state)
    left = set(average)
    for file in sorted((*folder.rglob(SAFE_WEIGHTS_NAME), *folder.rglob(ADAPTER_WEIGHTS_NAME))):
        adapter = None if file.name == SAFE_WEIGHTS_NAME else find_adapter_name(file.parent, folder)
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


def find_adapter_name(place: Path, folder: Path) -> str:
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


def load_adapted(checkpoint: Path, *, bits: str | None = None) -> Model:
    """Loads the base model of a checkpoint's adapter, with the adapter on it and not merged.

    Its special tokens are those that the adapter was trained with.

    Args:
        checkpoint: directory with the adapter; it, or the run that it is of, has the configuration of the model.
        bits: "4bit" or "8bit" to load the weights of the base as a run with `model.quantization` does.

    Raises:
        CheckpointError: the model that the adapter belongs to cannot be loaded.
    """
    with needs_package("An adapter needs the package peft: pip install peft"):
        from peft import PeftModel
    import transformers
    from safetensors import SafetensorError

    settings = checkpoint / ADAPTER_CONFIG_NAME
    base_name = read_json(settings, max_bytes=1 << 20)["base_model_name_or_path"]
    check_base(checkpoint)
    described = next((one for one in (checkpoint, checkpoint.absolute().parent) if (one / CONFIG_NAME).is_file()), None)
    with _quiet():
        try:
            config: Any = transformers.AutoConfig.from_pretrained(described or base_name, trust_remote_code=False)
            config.__dict__.pop("quantization_config", None)
            cls = getattr(transformers, (config.architectures or ["AutoModel"])[0])
            if described is not None:
                # The run may have added tokens; the files have the rows of before.
                own = transformers.AutoConfig.from_pretrained(base_name, trust_remote_code=False)
                config.get_text_config().vocab_size = own.get_text_config().vocab_size
            given = {"config": config, "dtype": config.dtype or "auto", **quantized(bits)}
            base = cls.from_pretrained(base_name, trust_remote_code=False, **given)
            _resize_embeddings(base, checkpoint)
            restore_tokens(base, checkpoint)
            return PeftModel.from_pretrained(base, checkpoint).eval()
        except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint}: the adapter cannot be loaded: {error}") from error


def _resize_embeddings(base: Any, checkpoint: Path) -> None:
    """Gives a base model rows for the tokens that a run has added; their values are in the adapter's files."""
    from safetensors import safe_open

    path = checkpoint / ADAPTER_WEIGHTS_NAME
    embeddings = base.get_input_embeddings()
    if not path.is_file() or embeddings is None:
        return
    with safe_open(path, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 -- not a mapping

    def find_rows(layer: Any) -> int | None:
        name = next(name for name, module in base.named_modules() if module is layer)
        return next((shape[0] for key, shape in shapes.items() if f".{name}." in key and key.endswith(".weight")), None)

    rows = find_rows(embeddings)
    if rows in (None, embeddings.num_embeddings):
        return
    base.resize_token_embeddings(rows, mean_resizing=False)
    head = base.get_output_embeddings()
    if head is not None and head.weight is not base.get_input_embeddings().weight and find_rows(head) is None:
        raise CheckpointError(
            f"{checkpoint}: the run added tokens, and the adapter's files lack the rows of the head for them, which "
            "peft saves with it alone. Train again with the head (lm_head) in modules_to_save."
        )


def check_base(checkpoint: Path) -> None:
    """Raises CheckpointError for a base model that was moved away, or has weights that nothing can be merged into."""
    settings = checkpoint / ADAPTER_CONFIG_NAME
    name = str(read_json(settings, max_bytes=1 << 20)["base_model_name_or_path"])
    place = Path(name)
    if place.is_absolute() and not place.is_dir():
        raise CheckpointError(
            f"The base model of the adapter was in {name}, and is not there. Put it back, or write where it is now as "
            f"base_model_name_or_path in {settings}."
        )
    config = place / CONFIG_NAME
    if config.is_file() and read_json(config, max_bytes=1 << 24).get("quantization_config"):
        raise CheckpointError(
            f"The base model in {name} has weights of few bits (quantization_config in its {CONFIG_NAME}), and a merge "
            "into them would round the adapter away. Write the same model in full precision as base_model_name_or_path "
            f"in {settings}."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    from trainwright.cli.tasks.models import quiet_transformers

    with quiet_transformers(), warnings.catch_warnings():
        # warnings of transformers about files read by peft
        warnings.simplefilter("ignore")
        yield


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Model]]]:
    """Yields the layers with an adapter: name in the base model, the layer itself, its adapters, innermost first."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    inside: set[Model] = set()
    for name, module in model.named_modules():
        layer: Model = module
        if not isinstance(module, BaseTunerLayer) or layer in inside:
            continue
        adapters: list[Model] = []
        while isinstance(layer, BaseTunerLayer):
            shown: Model = layer
            adapters.insert(0, shown)
            inside.add(shown)
            layer = shown.base_layer
        yield name, layer, adapters


def merge_layer(layer: nn.Module, adapters: Sequence[Model]) -> None:
    """Merges adapters into a layer in float32, so that nothing is rounded before the sum is."""
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in layer.parameters()):
        layer.float()
    for adapter in adapters:
        adapter.merge()


def merge(checkpoint: Path, folder: Path, *, dtype: torch.dtype | None = None) -> list[Path]:
    """Writes the model of a checkpoint with its adapter merged into its weights.

    Each layer is merged in float32, and rounded once.

    Args:
        checkpoint: directory with the adapter; it, or the run that it is of, has the configuration of the model.
        folder: directory to write; it must be empty, or missing.
        dtype: type of the weights to write; None for that of the base model.

    Raises:
        CheckpointError: the model that the adapter belongs to cannot be loaded.
    """
    adapted = load_adapted(checkpoint)
    with _quiet():
        try:
            for _, layer, adapters in adapted_layers(adapted):
                known = next((one.dtype for one in layer.parameters()), None)
                merge_layer(layer, adapters)
                layer.to(dtype or known)
            merged = adapted.merge_and_unload()
        except (ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint}: the adapter cannot be merged: {error}") from error
        export_model(checkpoint, folder, parts=sharded_state)  # also refuses a folder that is not empty, or damage
        for name in (*ADAPTER_FILES, ADAPTER_CONFIG_NAME):
            (folder / name).unlink(missing_ok=True)
        if dtype is not None:
            _check_range(merged.state_dict(), dtype)
            merged.to(dtype)
        with keep_generation(merged, folder):
            merged.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cast_weights(folder: Path, dtype: torch.dtype) -> None:
    """Rounds the exported weights to a type, in the files and in the configuration; numbers without fractions stay."""
    for file in sorted((*folder.rglob(SAFE_WEIGHTS_NAME), *folder.rglob(ADAPTER_WEIGHTS_NAME))):
        weights = read_file(file)
        _check_range(weights, dtype)
        save_file({name: one.to(dtype) if one.is_floating_point() else one for name, one in weights.items()}, file)
    config = folder / CONFIG_NAME
    # Beside an adapter it is that of the base, whose weights are elsewhere and not rounded.
    if config.is_file() and not has_adapter(folder):
        found = read_json(config, max_bytes=1 << 24)
        found.pop("torch_dtype", None)
        found["dtype"] = str(dtype).removeprefix("torch.")
        write_text(config, json.dumps(found, indent=2, sort_keys=True) + "\n")
    use_umask(folder)


def _check_range(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Raises CheckpointError for a weight that a narrower type has no number for."""
    if dtype is not torch.float16:
        return
    for name, one in weights.items():
        if one.is_floating_point() and one.numel() and float(one.abs().max()) > torch.finfo(dtype).max:
            raise CheckpointError(f"{name} has weights beyond the range of fp16. Export with --dtype bf16 or fp32.")


def _remove_partial(place: Path) -> None:
    """Removes what exports of ended processes left in a directory, whatever they were to be called."""
    if not place.is_dir():
        return
    names = [name.removesuffix(PARTIAL) for name in os.listdir(place) if name.endswith(PARTIAL)]
    for start in {name[: name.rindex(".") + 1] for name in names if name.startswith(".")}:
        remove_left(place, start, PARTIAL)


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yields a partial directory, whose files come to `folder` when the context ends well; else nothing is left.

    Raises:
        CheckpointError: the directory has files, or cannot be written.
    """
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there. Choose another directory."
        )
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. Choose a directory.")
    # A directory that is there may be a mount or the working directory, which cannot be replaced by a rename.
    place = folder.absolute().parent if is_new else folder
    for one in {place, folder.absolute().parent}:
        _remove_partial(one)
    if not is_new and (names := sorted(path.name for path in folder.iterdir())):
        hidden = f": it has {names[0]}" if all(name.startswith(".") for name in names) else ""
        raise CheckpointError(f"{folder} is not empty{hidden}. Choose another directory.")
    start = f".{folder.name}." if is_new else "."
    partial = place / f"{start}{owner_mark()}-{secrets.token_hex(4)}{PARTIAL}"
    try:
        # Now, and not after an hour of merging: it may not be allowed.
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}. Choose another directory.") from error
    try:
        yield partial
        if is_new:
            try:
                partial.rename(folder)
            except OSError as error:
                if not folder.exists():
                    raise
                raise CheckpointError(f"{folder} was made meanwhile. Choose another directory.") from error
            return
        # The configuration is last: without it no reader takes the directory for a model.
        for path in sorted(partial.iterdir(), key=lambda path: (path.name == CONFIG_NAME, path.name)):
            path.rename(folder / path.name)
        partial.rmdir()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
