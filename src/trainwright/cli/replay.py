"""Replay of an incident bundle in a fresh process: repeats one step without the data set. Nothing is unpickled.

Only JSON and safetensors files are read, after a comparison with the digests of the bundle. The model is a class of
transformers named in `config.json`, without code from the bundle, or the return value of a user's function.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from trainwright._types import MANIFEST_NAME, JSONObject, counted, without_tokens
from trainwright.capabilities.incidents import bundle
from trainwright.capabilities.incidents.contents import LOSS_SETTINGS, bad_rows, place_text, window_losses
from trainwright.capabilities.incidents.probe import (
    Findings,
    entries_not_finite,
    probe,
    select_rows,
    weights_not_finite,
)
from trainwright.capability_table import register_attention
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest, find_problem, list_problems
from trainwright.checkpoint.weights import load_weights, make_pretrained, weight_files
from trainwright.config.arguments import TrainingArguments
from trainwright.engine import sharded_state
from trainwright.errors import BundleError, ModelError
from trainwright.loop.incident import SPIKE
from trainwright.loop.step import Window
from trainwright.run.internals import Internals
from trainwright.run.patched_model import patched
from trainwright.run.train import noise_on_embeddings
from trainwright.support.loss_normalization import LossRule
from trainwright.support.tensor_tree import find_batch_size
from trainwright.trainer import Trainer

OWN_LOSS = (
    "The model was made from its config, with its own loss. If the run had a compute_loss or a model of its own, name "
    "them with --model module:function, a function that returns the Trainer"
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay."""

    lines: list[str]  # text for the terminal
    is_same: bool  # losses or error are the same as in the incident, bit for bit


def replay(folder: Path, *, model: str | None, precision: str | None, one_by_one: bool) -> Replayed:
    """Repeats the step of a bundle; returns lines for the terminal, and whether the result equals that of the incident.

    `model` is "module:function", which returns the model, or a Trainer with it if the loss is the trainer's own;
    `precision` replaces the run's; `one_by_one` also runs each sample by itself, and shows its loss. Raises BundleError
    if the bundle is damaged or lacks data for the replay, ModelError if the model cannot be made.
    """
    about = checked(folder)
    made = None if model is None else _from_user(model)
    try:
        return _replay(folder, about, model, made, precision=precision, one_by_one=one_by_one)
    except (BundleError, ModelError):
        raise
    except Exception as error:  # any error caused by invalid values in the files
        raise BundleError(f"{folder} is invalid: {error!r}.") from error


def _replay(
    folder: Path, about: JSONObject, model: str | None, made: object, *, precision: str | None, one_by_one: bool
) -> Replayed:
    batches = bundle.read_batches(folder)
    states = bundle.read_random_states(folder)
    settings = _settings(folder, about) | {"gradient_accumulation_steps": len(batches) or 1}
    if precision is not None:
        settings |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(folder, about, settings, model, made, Path(scratch), to_fp32=precision == "fp32")
        divisor = about.get("divisor")
        divisor = None if divisor is None else torch.tensor(float(divisor), device=trainer.args.device)
        window = Window(batches, _num_items(about, trainer.args.device), divisor=divisor)
        internals = Internals(trainer)
        run = internals.run
        try:
            run.losses.rule = LossRule(**about["loss_rule"])
            run.progress.window.num_parts = int(about["num_parts"])
            torch.set_num_threads(int(about["environment"]["threads"]))
        except (TypeError, KeyError, ValueError) as error:
            raise BundleError(f"{folder / bundle.INCIDENT} is invalid: {error!r}.") from error
        bare = internals.engine.unwrap(trainer.model)
        keeps = internals.uses_outputs()
        noise = noise_on_embeddings(trainer)
        with patched(trainer.args, trainer.model, internals.engine, keeps_outputs=keeps, noise=noise):
            rng.restore(states)
            found = probe(bare, lambda: window_losses(trainer, run, bare, window))
            lines = [*_what_happened(folder, about), *_result(about, found, model=model, precision=precision)]
            lines += _samples(trainer, bare, window, about, found)
            if one_by_one:
                lines += _one_by_one(trainer, bare, window, about)
    return Replayed(lines, _is_same(about, found))


def checked(folder: Path) -> JSONObject:
    """Verifies a bundle and returns the content of `incident.json`; BundleError names a missing or altered file."""
    if not folder.is_dir():
        raise BundleError(f"There is no directory {folder}.")
    missing = next((n for n in (MANIFEST_NAME, bundle.INCIDENT) if not (folder / n).is_file()), None)
    manifest = Manifest.read(folder)
    problem = f"{missing} is missing" if missing else next(list_problems(folder, manifest), None)
    if problem is None and manifest is not None:
        unlisted = [path.name for path in folder.iterdir() if path.name not in {*manifest.files, MANIFEST_NAME}]
        problem = f"{unlisted[0]} is not in {MANIFEST_NAME}" if unlisted else None
    if problem is not None:
        raise BundleError(f"{folder} is not an intact incident bundle: {problem}.")
    about = bundle.read_object(folder, bundle.INCIDENT)
    if about.get("format") != 1:
        raise BundleError(f"{folder / bundle.INCIDENT} has format {about.get('format')!r}; this version reads 1.")
    bundle.check_incident(folder, about)
    absent = about.get("missing") or {}
    for name in ("batch", "random states"):
        if name in absent and not str(absent[name]).startswith("kept as text"):
            raise BundleError(f"{folder} has no {name}: {absent[name]}. There is nothing to replay.")
    return about


def _settings(folder: Path, about: JSONObject) -> JSONObject:
    found = about.get("loss_settings")
    if not isinstance(found, dict):
        raise BundleError(f"{folder / bundle.INCIDENT} has no loss_settings.")
    return {name: found[name] for name in LOSS_SETTINGS if found.get(name) is not None}


def _trainer(
    folder: Path,
    about: JSONObject,
    settings: JSONObject,
    model: str | None,
    made: object,
    scratch: Path,
    *,
    to_fp32: bool,
) -> Trainer:
    """Makes a trainer that computes the loss as the run did, with the weights of the bundle."""
    source = _source(folder, about)
    found = sharded_state.read_weights(source) if sharded_state.has_weights(source) else None
    made = _from_config(source, about, found) if model is None else made
    args = TrainingArguments(
        output_dir=str(scratch), report_to="none", use_cpu=about.get("device") == "cpu", save_strategy="no", **settings
    )
    if isinstance(made, Trainer):
        trainer = made
    elif isinstance(made, torch.nn.Module):
        trainer = Trainer(model=made, args=args)
    else:
        raise ModelError(f"--model {model} returned a {type(made).__name__}; return a module, or a Trainer.")
    if model is not None and (found or weight_files(source)):
        result = load_weights(trainer.model, source, found=found)
        if result.missing_keys or result.unexpected_keys:
            names = ", ".join([*result.missing_keys, *result.unexpected_keys][:5])
            raise ModelError(f"The weights of {source} do not match --model {model}: {names}.")
    if to_fp32:
        trainer.model.float()
    trainer.model.train()
    modules = dict(trainer.model.named_modules())
    for name in about.get("modules_in_eval_mode") or ():
        if name in modules:
            modules[name].training = False
    return trainer


def _source(folder: Path, about: JSONObject) -> Path:
    """Returns the directory with the weights: the bundle, or if it has none, the checkpoint that it names."""
    parent = folder / str((about.get("parent") or {}).get("path", ""))
    has_none = not weight_files(folder) and parent.is_dir() and find_problem(parent) is None
    return parent.resolve() if has_none else folder


def _from_user(name: str) -> object:
    """Calls the user's function."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # where `python -m` would look
    try:
        make: Callable[[], object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"--model {name}: {error}. Write it as module:function.") from error
    return make()


def _from_config(folder: Path, about: JSONObject, found: Mapping[str, torch.Tensor] | None) -> torch.nn.Module:
    """Makes a model of transformers from `config.json`; code in a bundle is never run."""
    name = str(about.get("model_class"))
    if not about.get("is_pretrained") or not (folder / "config.json").is_file():
        raise ModelError(
            f"The model of {folder} is a {name}, which is not a model of transformers. Give a function that makes it, "
            "without arguments: --model module:function."
        )
    if found is None and not weight_files(folder):
        raise BundleError(f"{folder} has no weights: {(about.get('missing') or {}).get('weights')}.")
    bundle.check_config(folder, "config.json")
    register_attention(about.get("attn_implementation"))
    try:
        return make_pretrained(folder, name, attention=about.get("attn_implementation"), found=found)
    except ModelError as error:
        if error.__cause__ is None:  # transformers has no model of that name
            raise
        raise BundleError(f"The files in {folder} are not a model: {error}") from error


def _num_items(about: JSONObject, device: torch.device) -> torch.Tensor | int | None:
    number = about.get("num_items")
    if number is None:
        return None
    return torch.tensor(float(number), device=device) if about.get("num_items_is_tensor") else int(number)


# -- output ----------------------------------------------------------------------------------------------------------


def _what_happened(folder: Path, about: JSONObject) -> list[str]:
    lines = [f"incident  {about.get('kind')} at step {about.get('step')}: {about.get('what')}"]
    values = about.get("values") or {}
    if values:
        lines.append("values    " + ", ".join(f"{name} {value}" for name, value in values.items()))
    if not weight_files(folder):
        source = _source(folder, about)
        step = int(about.get("step") or 1) - 1
        before = step - int((about.get("parent") or {}).get("step", step))
        apart = f"{counted(before, 'step')} before the incident's"
        where = "the function's" if source == folder else f"{source.name}'s, {apart}"
        lines.append(f"weights   {where}: the bundle has none ({(about.get('missing') or {}).get('weights')})")
    return lines


def _is_same(about: JSONObject, found: Findings) -> bool:
    bits = about.get("loss_bits")
    is_same = [bundle.bits(one) for one in found.losses] == bits or (found.error != "" and not bits)
    return is_same and without_tokens(found.error) == without_tokens(about.get("error") or "")


def _result(about: JSONObject, found: Findings, *, model: str | None, precision: str | None) -> list[str]:
    losses = ", ".join(f"{float(loss):.6g}" for loss in found.losses)
    own = "" if model is not None else f". {OWN_LOSS}"
    if _is_same(about, found) and found.error:
        how = "losses and error are the same as in the incident"
    elif _is_same(about, found):
        how = "the same bits as in the incident" if about.get("is_exact") else "the same bits as after the incident"
    elif precision is not None:
        how = f"in {precision}; the incident had {_numbers(about)}{own}"
    else:
        why = "" if about.get("is_exact") else " (its random states are not known)"
        how = f"NOT the bits of the incident, {_numbers(about)}{why}{own}"
    if found.error:
        return [f"error     {found.error}", f"losses    before it: {losses or 'none'}; {how}"]
    origin = found.origin or "all outputs, losses and gradients are finite"
    lines = [f"loss      {losses or 'none'}: {how}", f"origin    {origin}"]
    if not any(map(math.isfinite, found.gradients.values())):
        return (
            [*lines, f"gradients of all {len(found.gradients)} parameters are not finite"] if found.gradients else lines
        )
    return [*lines, "gradients " + ", ".join(f"{name} {norm:.4g}" for name, norm in found.largest.items())]


def _numbers(about: JSONObject) -> str:
    return ", ".join(str(loss) for loss in about.get("losses") or ()) or "none"


def _samples(trainer: Trainer, bare: Any, window: Window, about: JSONObject, found: Findings) -> list[str]:
    """Searches for the samples that are bad by themselves."""
    if found.is_finite:
        is_spike = about.get("kind") == SPIKE
        return ["sample    --one-by-one names the sample with the largest loss"] if is_spike else []
    rows = bad_rows(trainer, Internals(trainer).run, bare, window, error=found.error)
    if rows is None:
        names = ", ".join(weights_not_finite(bare)[:5])
        return [f"weights   not finite: {names}" if names else "sample    most samples are bad by themselves"]
    if not rows:
        return ["sample    no sample is bad by itself"]
    lines = []
    for number, row in rows:
        batch = window.batches[number]
        entries = entries_not_finite(select_rows(batch, [row], find_batch_size(batch) or 1))
        odd = f": {', '.join(entries)} not finite" if entries else ""
        lines.append(f"sample    {_place(about, number, row)}{odd}")
    return lines


def _place(about: JSONObject, number: int, row: int) -> str:
    samples = about.get("samples") or []
    known = number < len(samples) and row < len(samples[number])
    place = place_text(number, row)
    if not known:
        return place
    return f"{samples[number][row]} ({place})"


def _one_by_one(trainer: Trainer, bare: Any, window: Window, about: JSONObject) -> list[str]:
    """Runs each sample of each micro-batch by itself, as a micro-batch of one sample.

    The last lines name the largest loss and the largest norm of the gradient, if all are finite.
    """
    run = Internals(trainer).run
    lines = []
    values = list[tuple[float, float, str]]()
    for number, batch in enumerate(window.batches):
        size = find_batch_size(batch) or 1
        for row in range(size):
            one = Window([select_rows(batch, [row], size)], window.num_items)
            found = probe(bare, lambda one=one: window_losses(trainer, run, bare, one))  # type: ignore[misc]
            place = _place(about, number, row)
            norm = math.hypot(*found.gradients.values())
            if found.error:
                lines.append(f"one       {place}: {found.error}")
                continue
            values.append((float(found.losses[0]), norm, place))
            lines.append(f"one       {place}: loss {values[-1][0]:.6g}, gradient norm {norm:.4g}")
    if len(values) < len(lines) or not all(math.isfinite(loss + norm) for loss, norm, _ in values):
        return lines
    for which, name in enumerate(("loss", "gradient norm")):
        lines.append(f"largest   {name}: {max(values, key=itemgetter(which))[-1]}")
    return lines
