"""Weights in `from_pretrained` form: safetensors or torch's files, whole or in shards, adapters; model export."""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from trainwright._types import (
    MANIFEST_NAME,
    PREFIX_CHECKPOINT_DIR,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_JSON_NAME,
    UnmatchedKeys,
    UnmatchedNames,
    is_instance_of,
    optional_class,
    replacing,
)
from trainwright.checkpoint.deferred_io import IMMEDIATE, FileSink
from trainwright.checkpoint.extra_state import (
    EXTRA_STATE_NAME,
    extra_states,
    load_extra_states,
    save_extra_states,
    tensors_only,
)
from trainwright.checkpoint.manifest import find_problem
from trainwright.errors import CheckpointError, CheckpointNotFoundError, ModelError
from trainwright.support.door import OwnFolder, RelativeName, read_json
from trainwright.support.tensor_tree import storage_place

SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
GENERATION_NAME = "generation_config.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS_NAME, "adapter_model.bin")
MAX_INDEX_BYTES = 256 << 20
# Files a model needs besides its weights: settings, vocabularies, templates, adapters.
KEPT = (".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".py")
OF_TRAINING = (MANIFEST_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME, SAFE_WEIGHTS_INDEX_NAME)
LOAD_WHOLE = partial(nn.Module.load_state_dict, strict=False)

Weights: TypeAlias = dict[str, torch.Tensor]
Pretrained: TypeAlias = Any  # a model (or its configuration) of transformers or peft, with their methods


def save_weights(
    model: nn.Module,
    folder: Path,
    *,
    state_dict: Weights | None = None,
    sink: FileSink = IMMEDIATE,
    as_safetensors: bool = True,
) -> None:
    """Writes a model (of transformers or peft, or any module) for `from_pretrained` or `load_weights`.

    Tied and shared weights of a plain module are written once, non-contiguous ones as contiguous. `state_dict` has the
    weights if the model does not hold them all; it is empty to write only the configuration. `sink` may write later,
    but a model with its own `save_pretrained`, which reads the model, is written immediately.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapters: Pretrained = getattr(model, "peft_config", None) or {}
    save_extra_states(model, folder, sink=sink)
    state_dict = None if state_dict is None else tensors_only(state_dict)
    written = [] if as_safetensors else [folder, *(folder / name for name in adapters)]
    saver: Pretrained = getattr(model, "save_pretrained", None)
    if state_dict is not None and not state_dict:
        return _save_description(model, folder)
    takes = saver is not None and _takes_its_weights(model)
    shown: Pretrained = _as_it_is_now(model) if takes else model

    def write(copied: Weights | None) -> None:
        if copied is not None and saver is None:
            # a signal while the user saves leaves the older model intact
            with replacing(folder / SAFE_WEIGHTS_NAME) as beside:
                save_file(copied, beside)
            use_umask(folder)
        else:
            _save_pretrained(shown.save_pretrained, folder, copied)
        rewrite_with_torch(written)

    if saver is None:
        sink.put(_each_once(model) if state_dict is None else _without_repetitions(model, state_dict), write)
    elif takes:
        sink.put(tensors_only(model.state_dict()) if state_dict is None else state_dict, write)
    else:
        write(tensors_only(model.state_dict()) if state_dict is None and extra_states(model) else state_dict)


def rewrite_with_torch(folders: Iterable[Path]) -> None:
    """Replaces the safetensors files in these folders by torch files with the same contents."""
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")):
            torch.save(read_file(file), file.with_name(_name_torch_file(file.name)))
            file.unlink()
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if not index.is_file():
            continue
        found = read_json(index, max_bytes=MAX_INDEX_BYTES)
        found["weight_map"] = {name: _name_torch_file(file) for name, file in found["weight_map"].items()}
        (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(found, indent=2, sort_keys=True), encoding="utf-8")
        index.unlink()


def _name_torch_file(name: str) -> str:
    """model-00001-of-00002.safetensors -> pytorch_model-00001-of-00002.bin."""
    renamed = f"pytorch_{name}" if name.startswith("model") else name
    return renamed.removesuffix(".safetensors") + ".bin"


def use_umask(folder: Path) -> None:
    """Gives weight files the mode of any new file: their writer makes them readable by their owner alone."""
    own = OwnFolder(folder)
    probe = RelativeName.parse(f".mode.{os.getpid()}.{secrets.token_hex(4)}.partial")
    with own.open(probe, "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    own.unlink(probe)
    for path in (*folder.glob("*.safetensors"), *folder.glob(f"*/{ADAPTER_WEIGHTS_NAME}")):
        # A link, which may name a file of someone else, is not followed.
        with suppress(OSError, ValueError), own.open(RelativeName.parse(path.relative_to(folder).as_posix())) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600:
                os.fchmod(file.fileno(), mode)


def _save_description(model: nn.Module, folder: Path) -> None:
    configs: list[Pretrained] = [getattr(model, name, None) for name in ("config", "generation_config")]
    adapters = getattr(model, "peft_config", None)
    configs += adapters.values() if isinstance(adapters, dict) else ()
    with keep_generation(model, folder):
        for config in configs:
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)


@contextmanager
def keep_generation(model: Any, folder: Path) -> Iterator[None]:
    """Within it, a model can be saved whose settings of the generation transformers refuses; they are written as is.

    Sampling values without `do_sample=True`, which many published models have, are refused once another entry has
    changed, such as the end tokens: a training would be lost at its first save.

    Args:
        model: any; those without such settings are left alone.
        folder: directory that it is saved in.
    """
    config: Pretrained = getattr(model, "__dict__", {}).get("generation_config")
    cls: Pretrained = optional_class("transformers.generation.configuration_utils", "GenerationConfig")
    if cls is None or not isinstance(config, cls) or _is_saved(config):
        yield
        return
    model.generation_config = cls()
    try:
        yield
    finally:
        model.generation_config = config
    if (folder / GENERATION_NAME).is_file():
        config.to_json_file(folder / GENERATION_NAME)


def _is_saved(config: Any) -> bool:
    """Returns whether settings of the generation contradict each other in nothing."""
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def _without_repetitions(model: nn.Module, state_dict: Weights) -> dict[str, torch.Tensor]:
    """Returns the weights of a plain module, tied ones under their first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    repeated = {name for name, parameter in named if first.setdefault(parameter, name) != name}
    return {name: tensor.contiguous() for name, tensor in state_dict.items() if name not in repeated}


def _save_pretrained(saver: Callable[..., object], folder: Path, state_dict: Weights | None) -> None:
    model = getattr(saver, "__self__", None)
    whole = _as_a_whole(model) if state_dict is not None else nullcontext()
    with _without_progress_bars(), whole, keep_generation(model, folder):
        saver(folder, state_dict=state_dict)
    use_umask(folder)


@contextmanager
def _as_a_whole(model: nn.Module | None) -> Iterator[None]:
    """Hides the distributed configuration: transformers must not wait for processes with parts of the weights."""
    config: Pretrained = getattr(model, "config", None)
    sizes = getattr(config, "distributed_config", None)
    if sizes is None:
        yield
        return
    config.distributed_config = None
    try:
        yield
    finally:
        config.distributed_config = sizes


def _takes_its_weights(model: nn.Module) -> bool:
    """Returns True if `save_pretrained` is transformers' own, and writes the given weights, not the model's."""
    cls = optional_class("transformers.modeling_utils", "PreTrainedModel")
    own = getattr(cls, "save_pretrained", None)
    reads_the_model = ("hf_quantizer", "peft_config", "hf_device_map")
    return (
        getattr(type(model), "save_pretrained", model) is own
        and "save_pretrained" not in vars(model)
        and not any(getattr(model, name, None) for name in reads_the_model)
    )


def _as_it_is_now(model: nn.Module) -> nn.Module:
    """Copies a model with its settings but without its weights: a later write must not show later settings."""
    try:
        twin = copy.copy(model)
    except TypeError:  # a sharded model cannot be copied, and is not written later
        return model
    for name in ("config", "generation_config"):
        if name in vars(model):
            vars(twin)[name] = copy.deepcopy(vars(model)[name])
    return twin


def _each_once(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a plain module with tied weights under their first name, each in its own memory."""
    state = {}
    seen = set()
    for name, tensor in tensors_only(model.state_dict()).items():
        place = (storage_place(tensor), tensor.shape, tensor.stride())
        if tensor.numel() > 0 and place in seen:
            continue
        seen.add(place)
        is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        state[name] = tensor.detach().contiguous().clone() if is_part else tensor.detach().contiguous()
    return state


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Turns transformers' progress bars off."""
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def make_pretrained(
    folder: Path, class_name: str, *, attention: str | None, found: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Makes a model of transformers from a directory's `config.json` and safetensors; runs no code and no pickles.

    `found` are already read weights; None reads the directory's weights. Raises ModelError if transformers has no such
    model, or it does not fit the files.
    """
    import transformers

    cls = getattr(transformers, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ModelError(f"transformers has no model {class_name}.")
    given: dict[str, Pretrained] = {"local_files_only": True, "use_safetensors": True}
    try:
        if found is not None:
            given = {"config": cls.config_class.from_pretrained(folder), "state_dict": dict(found)}  # type: ignore[union-attr]
        with _without_progress_bars():
            where = folder if found is None else None
            return cls.from_pretrained(where, dtype="auto", attn_implementation=attention, **given)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{class_name} cannot be made from {folder}: {error}") from error


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    found: Mapping[str, torch.Tensor] | None = None,
    load: Callable[[nn.Module, Mapping[str, torch.Tensor]], UnmatchedKeys] = LOAD_WHOLE,
) -> UnmatchedKeys:
    """Loads weights and extra states into a model, of any kind that `save_weights` takes, in place.

    `found` are already read weights of the checkpoint; `load` puts them into the model, and returns the keys that did
    not match. Missing weights, or weights of another shape, raise CheckpointError.
    """
    result = _load_tensors(model, folder, found=found, load=load)
    restored = load_extra_states(model, folder)
    missing = [name for name in result.missing_keys if name not in restored]
    return UnmatchedNames(missing, list(result.unexpected_keys))


def _load_tensors(
    model: nn.Module,
    folder: Path,
    *,
    found: Mapping[str, torch.Tensor] | None,
    load: Callable[[nn.Module, Mapping[str, torch.Tensor]], UnmatchedKeys],
) -> UnmatchedKeys:
    if is_adapter(model) and found is None:
        _load_adapter(model, folder)
        return UnmatchedNames([], [])
    files = weight_files(folder) if found is None else []
    if found is None and not files:
        raise CheckpointError(
            f"Can't find a valid checkpoint at {folder}, which has no weights: neither {SAFE_WEIGHTS_NAME} nor "
            f"{SAFE_WEIGHTS_INDEX_NAME} is there, nor {WEIGHTS_NAME}. Use a directory written by a trainer or "
            "save_pretrained."
        )
    state_dict = dict(found or {})
    for file in files:
        state_dict |= read_file(file)
    if not is_adapter(model):
        state_dict = _in_the_models_names(model, state_dict)
    _check_kinds(model, state_dict, folder)
    try:
        result = load(model, state_dict)
    except RuntimeError as error:
        raise CheckpointError(f"The weights in {folder} do not fit {type(model).__name__}: {error}") from error
    if is_adapter(model):  # the weights that it adapts are not in a checkpoint
        return UnmatchedNames([], list(result.unexpected_keys))
    tie_weights: Callable[[], object] | None = getattr(model, "tie_weights", None)
    if result.missing_keys and tie_weights is not None:
        tie_weights()
    shared = _shared_names(model)
    return UnmatchedNames([name for name in result.missing_keys if name not in shared], list(result.unexpected_keys))


def _check_kinds(model: Pretrained, state_dict: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raises CheckpointError for whole numbers where the model has fractions: torch would round without a word.

    Another precision of the same kind is valid. A model that quantizes its weights has a loader of its own.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return
    own = model.state_dict()
    for name, saved in state_dict.items():
        mine = own.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor) and is_inexact(mine) > is_inexact(saved):
            raise CheckpointError(
                f"The weights in {folder} do not fit {type(model).__name__}: {name} has numbers of {saved.dtype}, and "
                f"the model has {mine.dtype}. Use another checkpoint."
            )


def is_inexact(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has numbers with fractions."""
    return tensor.is_floating_point() or tensor.is_complex()


def _in_the_models_names(model: Pretrained, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts weights to the names and shapes of the model.

    `save_pretrained` writes some models, such as ViT, with the names of an older version; `from_pretrained` translates.
    """
    loader: Pretrained = getattr(type(model), "from_pretrained", None)
    own = model.state_dict()
    if loader is None or not is_instance_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return state_dict
    if not (state_dict.keys() - own.keys() and own.keys() - state_dict.keys()):
        return state_dict
    from trainwright.config.zero3_init import whole_models

    with _without_progress_bars(), whole_models():
        loaded, info = loader(
            None, config=model.config, state_dict=state_dict, dtype=model.dtype, output_loading_info=True
        )
    missing = set(info["missing_keys"])
    return {name: value for name, value in loaded.state_dict().items() if name not in missing}


def weight_files(folder: Path) -> list[Path]:
    """Returns a checkpoint's weight files, if any; a damaged or foreign index is a CheckpointError."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (folder / name).is_file():
            return [folder / name]
    paths = (folder / name for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME))
    if (index := next((path for path in paths if path.is_file()), None)) is None:
        return []
    try:
        names = sorted(set(read_json(index, max_bytes=MAX_INDEX_BYTES)["weight_map"].values()))
        outside = [name for name in names if not _is_file_name(name)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of weights: {error!r}.") from error
    if outside:
        listed = ", ".join(map(str, outside))
        raise CheckpointError(f"{index} lists files outside its directory: {listed}. It is not used.")
    return [folder / name for name in names]


def _is_file_name(name: object) -> bool:
    """Returns whether a value that was read names a file in a directory, not below or outside of it."""
    with suppress(ValueError):
        return bool(RelativeName.parse(name, parts=1))
    return False


def is_adapter(model: nn.Module) -> bool:
    """Returns True for a model of peft."""
    return is_instance_of(model, "peft", "PeftModel")


def save_file(weights: Weights, file: Path) -> None:
    """Writes weights as safetensors, as transformers does."""
    import safetensors.torch

    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """Reads one weight file, to the CPU; CheckpointError if that fails."""
    try:
        if file.suffix == ".safetensors":
            import safetensors.torch  # not at the top: it takes 0.8 MB, which importing the trainer does not need

            return safetensors.torch.load_file(file, device="cpu")
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the two readers raise, the file is unusable
        raise CheckpointError(f"{file} cannot be read as weights: {error}. Use another checkpoint.") from error


def _load_adapter(model: Pretrained, folder: Path) -> None:
    _check_adapters(folder)
    active = model.active_adapters[0]
    named = sorted({p.parent for file in ADAPTER_FILES for p in folder.glob(f"*/{file}") if p.is_file()})
    is_unnamed = any((folder / file).is_file() for file in ADAPTER_FILES)
    if not is_unnamed and not named:
        raise CheckpointError(f"{folder} has no adapter weights ({ADAPTER_WEIGHTS_NAME}), but the model is an adapter.")
    if is_unnamed:
        name = "default" if named else active
        model.load_adapter(str(folder), name, is_trainable=name == active)
    for path in named:
        model.load_adapter(str(path), path.name, is_trainable=path.name == active)
    model.set_adapter(active)


def _check_adapters(folder: Path) -> None:
    """Raises CheckpointError for adapters with whole numbers in their matrices, which peft would take as they are."""
    for path in (one for file in ADAPTER_FILES for pattern in (file, f"*/{file}") for one in folder.glob(pattern)):
        for name, saved in read_file(path).items() if path.is_file() else ():
            if "lora_" in name and not is_inexact(saved):
                raise CheckpointError(f"{path}: {name} has numbers of {saved.dtype}. Use another checkpoint.")


def _shared_names(model: nn.Module) -> set[str]:
    """Returns the names of tensors that also have another name; a file holds each tensor once."""
    first: dict[Hashable, str] = {}
    shared = set()
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        place = storage_place(tensor)
        if place in first:
            shared |= {name, first[place]}
        first[place] = name
    return shared


# -- export of a checkpoint's model ------------------------------------------------------------------------------------


class ShardedReader(Protocol):
    """Reader for checkpoints with weights that several processes wrote in parts."""

    def has_weights(self, folder: Path) -> bool: ...
    def read_weights(self, folder: Path) -> dict[str, torch.Tensor]: ...


def export_model(checkpoint: Path, folder: Path, *, parts: ShardedReader) -> list[Path]:
    """Writes the model of a checkpoint of any layout, in one file, into an empty or missing folder."""
    if not checkpoint.is_dir():
        raise CheckpointNotFoundError(f"There is no directory {checkpoint}.")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty. Choose another directory.")
    is_ours = (checkpoint / TRAINER_STATE_NAME).is_file() and (checkpoint / MANIFEST_NAME).is_file()
    if is_ours and (problem := find_problem(checkpoint)) is not None:
        raise CheckpointError(f"{checkpoint}: {problem}. Export another checkpoint.")
    shards = weight_files(checkpoint)
    adapters = list(_adapters(checkpoint))
    in_parts = not shards and parts.has_weights(checkpoint)
    if not (shards or adapters or in_parts):
        raise CheckpointError(f"{checkpoint} has no weights: neither {SAFE_WEIGHTS_NAME} nor {ADAPTER_WEIGHTS_NAME}.")
    folder.mkdir(parents=True, exist_ok=True)
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file()]
    named = [path for path in files if path.suffix in KEPT or path.name == EXTRA_STATE_NAME]
    settings = [path for path in named if path.name not in OF_TRAINING and not path.name.endswith("_results.json")]
    for path in [*settings, *adapters]:
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    if shards:
        _merge(shards, folder / SAFE_WEIGHTS_NAME)
    elif in_parts:
        weights = parts.read_weights(checkpoint)
        save_file(weights, folder / SAFE_WEIGHTS_NAME)
    use_umask(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _merge(shards: list[Path], target: Path) -> None:
    is_safe = shards[0].suffix == ".safetensors"
    if len(shards) == 1 and is_safe:
        shutil.copyfile(shards[0], target)
        return
    weights = {name: tensor for shard in shards for name, tensor in read_file(shard).items()}
    if not is_safe:  # tensors in one file may share memory there
        weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file(weights, target)


def _adapters(checkpoint: Path) -> Iterator[Path]:
    """Yields the adapters of the checkpoint itself, and named adapters in subdirectories that are not checkpoints."""
    named = (
        path
        for path in checkpoint.glob(f"*/{ADAPTER_WEIGHTS_NAME}")
        if not path.parent.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    )
    for weights in sorted([*checkpoint.glob(ADAPTER_WEIGHTS_NAME), *named]):
        if not weights.is_file():
            continue
        yield weights
        if weights.parent != checkpoint and (weights.parent / "adapter_config.json").is_file():
            yield weights.parent / "adapter_config.json"
