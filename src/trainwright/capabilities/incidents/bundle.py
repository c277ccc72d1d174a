"""Files of an incident bundle: batch and random states as safetensors and JSON, directory names. Runs no model.

    incidents/step-000123-nonfinite/
        incident.json         the event, its place and samples; versions, arguments, how to replay
        batch.safetensors     tensors of the micro-batches, as the collator made them
        batch.json            their structure, and values other than tensors
        rng.json              random states before the forward passes
        model.safetensors     weights (with config.json) before the step
        stacks.txt            for a hang: stacks of all threads
        manifest.json         size and digest of each file

Values of a batch are encoded in JSON, at any depth: {"tensor": name}, {"dict": [[key, value], ...]}, {"list": [...]},
{"tuple": [...]}, {"value": number, text or null}. Any other object is stored as text and listed in `incident.json`.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainwright._types import Batch, JSONObject, TailBatch, json_value, without_tokens
from trainwright.capabilities.incidents.forward_states import States
from trainwright.capability_table import list_attentions
from trainwright.errors import BundleError
from trainwright.support.door import MALFORMED, OwnFolder, RelativeName, read_json

FOLDER = "incidents"
INCIDENT = "incident.json"
BATCH = "batch.safetensors"
STRUCTURE = "batch.json"
RNG = "rng.json"
STACKS = "stacks.txt"
MOST_KEPT = 5
MAX_BYTES = 256 << 20  # per JSON file
MAX_DEPTH = 32  # per batch
MAX_NUMBER = 1 << 20  # for numbers of threads and parts of a micro-batch
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 40  # for any other number in the settings of a model
# Names that do not download code.
ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flex_attention", *list_attentions())
# Types of the entries of `incident.json` that a replay reads; an entry may be missing or null.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "step": int,
    "what": str,
    "values": dict,
    "missing": dict,
    "parent": dict,
    "samples": list,
    "losses": list,
    "loss_bits": list,
    "error": str,
    "origin": str,
    "is_exact": bool,
    "num_items": (int, float),
    "num_items_is_tensor": bool,
    "divisor": (int, float),
    "num_parts": int,
    "loss_rule": dict,
    "model_class": str,
    "is_pretrained": bool,
    "modules_in_eval_mode": list,
    "device": str,
    "environment": dict,
    "loss_settings": dict,
}
_NAME = re.compile(r"^step-\d+-[a-z]+(-rank\d+)?(-\d+)?$")


def bundles(root: Path) -> list[Path]:
    """Returns the bundles in a directory, oldest first."""
    found = [path for path in (root.iterdir() if root.is_dir() else ()) if _NAME.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))


def make_staging(folder: Path, name: str) -> Path:
    """Makes an empty directory to write a bundle into; OSError if the directory of bundles is a link."""
    own = OwnFolder(folder)
    staging = RelativeName.parse(f"{FOLDER}/.{name}.{os.getpid()}.staging")
    own.root.mkdir(parents=True, exist_ok=True)
    own.remove(staging)
    return own.make_folder(staging)


def free_name(root: Path, step: int, kind: str) -> str:
    """Returns an unused name for a bundle."""
    name = f"step-{step:06d}-{kind}"
    number = 1
    while (root / name).exists():
        number += 1
        name = f"step-{step:06d}-{kind}-{number}"
    return name


def write_json(path: Path, value: Any) -> None:  # Any: nested JSON
    """Writes JSON; non-finite numbers and other objects become text, secrets become ***."""
    path.write_text(json.dumps(json_value(value, text=without_tokens), indent=1), encoding="utf-8")


def read_object(folder: Path, name: str) -> JSONObject:
    """Reads a JSON file of a bundle; BundleError if it cannot be read or does not hold an object."""
    try:
        value = read_json(folder / name, max_bytes=MAX_BYTES)
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder / name} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise BundleError(f"{folder / name} holds a {type(value).__name__} instead of an object.")
    return value


def check_incident(folder: Path, about: JSONObject) -> None:
    """Raises BundleError for an invalid entry of `incident.json`."""
    place = folder / INCIDENT
    for name, kinds in _KINDS.items():
        value = about.get(name)
        is_huge = isinstance(value, (int, float)) and not abs(value) <= sys.maxsize  # NaN included
        if value is not None and (not isinstance(value, kinds) or is_huge):
            raise BundleError(f"{place} is invalid: {name} is {reprlib.repr(value)}.")
    for name, value in (("num_parts", about.get("num_parts")), ("threads", _threads(about))):
        if not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
            raise BundleError(f"{place} is invalid: {name} is {reprlib.repr(value)}.")
    if about.get("attn_implementation") not in ATTENTION:
        names = ", ".join(filter(None, ATTENTION))
        raise BundleError(
            f"{place} names the attention {reprlib.repr(about['attn_implementation'])}; a replay takes {names}. "
            "Name a function that makes the model: --model module:function."
        )


def _threads(about: JSONObject) -> object:
    return (about.get("environment") or {}).get("threads")


def check_config(folder: Path, name: str) -> None:
    """Raises BundleError if a model's settings have impossible sizes, or name code as their attention."""
    path = folder / name
    waiting: list[object] = [read_object(folder, name)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if isinstance(value, dict):
            waiting += value.values()
            named = [inner for key, inner in value.items() if key.endswith("attn_implementation")]
            check_sizes(path, value)
            if odd := next((inner for inner in named if not isinstance(inner, dict) and inner not in ATTENTION), None):
                raise BundleError(f"{path} names the attention {reprlib.repr(odd)}, which is not accepted from a file.")


def check_sizes(path: Path, values: JSONObject) -> None:
    """Raises BundleError for a size that would build an enormous model."""
    for name, value in values.items():
        most = MAX_LAYERS if "layer" in name else MAX_SIZE
        if type(value) is int and abs(value) > most:
            raise BundleError(f"{path} is invalid: {name} is {reprlib.repr(value)}.")


# -- batches ----------------------------------------------------------------------------------------------------------


def write_batches(batches: Sequence[Batch], folder: Path) -> list[str]:
    """Writes micro-batches as collated; returns the paths of values stored only as text."""
    tensors: dict[str, torch.Tensor] = {}
    lost: list[str] = []
    structure = [_encode(batch, str(number), tensors, lost) for number, batch in enumerate(batches)]
    safetensors.torch.save_file(tensors, folder / BATCH)
    text = json.dumps({"batches": structure}, default=str)  # with Python's NaN and Infinity
    (folder / STRUCTURE).write_text(text, encoding="utf-8")
    return lost


def read_batches(folder: Path) -> list[Batch]:
    """Reads the files of `write_batches`; BundleError names a damaged file."""
    try:
        tensors = safetensors.torch.load_file(folder / BATCH)
    except Exception as error:  # whatever the reader raises, the file is unusable
        raise BundleError(f"{folder / BATCH} cannot be read: {error}.") from error
    structure = read_object(folder, STRUCTURE).get("batches")
    try:
        batches = [_decode(one, tensors, MAX_DEPTH) for one in structure]  # type: ignore[union-attr]  # checked here
        if not all(isinstance(batch, dict) for batch in batches):
            raise TypeError("a batch is not a dict")
    except MALFORMED as error:
        raise BundleError(f"{folder / STRUCTURE} is invalid: {error!r}.") from error
    return batches


def _encode(value: Any, place: str, tensors: dict[str, torch.Tensor], lost: list[str]) -> JSONObject:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors[place] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": place}
    if isinstance(value, Mapping):
        items = [[key, _encode(one, f"{place}.{key}", tensors, lost)] for key, one in value.items()]
        tail = {"num_samples": value.num_samples, "weight": value.weight} if isinstance(value, TailBatch) else {}
        return {"dict": items, **tail}
    if isinstance(value, (list, tuple)):
        parts = [_encode(one, f"{place}.{i}", tensors, lost) for i, one in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if value is not None and not isinstance(value, (bool, int, float, str)):
        lost.append(place)
    return {"value": value}


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth == 0 or not isinstance(value, dict):
        raise ValueError("it is nested too deeply, or a value is not an object")
    if "tensor" in value:
        # In its own memory, aligned as in the run: kernels may use other code paths for a tensor inside a file's
        # memory.
        return tensors[value["tensor"]].clone()
    if "dict" in value:
        batch = {key: _decode(one, tensors, depth - 1) for key, one in value["dict"]}
        if "num_samples" not in value:
            return batch
        return TailBatch(batch, num_samples=int(value["num_samples"]), weight=float(value["weight"]))
    if "value" in value:
        return value["value"]
    kind = "tuple" if "tuple" in value else "list"
    return (tuple if kind == "tuple" else list)(_decode(one, tensors, depth - 1) for one in value[kind])


# -- random states ----------------------------------------------------------------------------------------------------


def write_random_states(states: States, folder: Path) -> None:
    """Writes plain random states (`checkpoint.rng.plain`) as JSON, with torch's states in base 64."""
    values = json_value({name: _random_json(state) for name, state in states.items()})
    (folder / RNG).write_text(json.dumps(values, indent=1), encoding="utf-8")  # base 64 must not be changed by masking


def read_random_states(folder: Path) -> States:
    """Reads the file of `write_random_states`; BundleError if it is damaged."""
    values = read_object(folder, RNG)
    try:
        states = {name: _random_state(value) for name, value in values.items()}
        version, words, gauss = states["python"]
        numpy = states["numpy"]
        python = (version, tuple(words), gauss)
        return {**states, "python": python, "numpy": numpy if isinstance(numpy, dict) else tuple(numpy)}
    except MALFORMED as error:
        raise BundleError(f"{folder / RNG} is invalid: {error!r}.") from error


def _random_json(state: Any) -> Any:  # Any: each generator has a type of its own
    if isinstance(state, torch.Tensor):
        return {"bytes": base64.b64encode(state.numpy().tobytes()).decode()}
    if isinstance(state, dict):
        return {name: _random_json(one) for name, one in state.items()}
    return [_random_json(one) for one in state] if isinstance(state, (list, tuple)) else state


def _random_state(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() != {"bytes"}:
        return {name: _random_state(one) for name, one in value.items()}
    if isinstance(value, dict):
        return torch.tensor(list(base64.b64decode(value["bytes"], validate=True)), dtype=torch.uint8)
    return [_random_state(one) for one in value] if isinstance(value, list) else value


# -- losses -----------------------------------------------------------------------------------------------------------


def bits(loss: torch.Tensor) -> str:
    """Returns a scalar as its type and its bytes, such as "float32 0000803f"; all NaN values are the same.

    The sign of a NaN depends on the order in which a kernel takes its operands, hence on their location in memory.
    """
    value = loss.detach().reshape(1).cpu()
    value = torch.where(value.isnan(), torch.full_like(value, math.nan), value)
    data = bytes(value.view(torch.uint8).tolist())
    return f"{str(loss.dtype).removeprefix('torch.')} {data.hex()}"
