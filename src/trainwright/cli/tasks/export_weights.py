"""The weights of an export beside the trained ones, layer by layer, and what became of those that differ.

A layer with an adapter is expected to be its base plus the adapter's change, summed in float32 and rounded once to the
type of the export. Each number may be one step of that type away, and as far as another order of the sum moves it:

    allowed = 2 u |weight| + 1e-4 x largest change of the layer          (u of `ROUNDINGS`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwright._types import counted
from trainwright.cli.tasks.export import adapted_layers, merge_layer

ROUNDINGS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ORDER_OF_SUM = 1e-4
LEAST_TIMES = 0.02  # that an adapter of another alpha or rank is away from its own change
LEAST_KEPT = 0.5  # of the adapter's change, by its projection


class ExportFault(NamedTuple):
    """Something of an export that is not as it was trained."""

    place: str  # module, or file of the export
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Expected(NamedTuple):
    """A tensor as it was trained."""

    name: str
    trained: torch.Tensor
    base: torch.Tensor | None = None  # before the training, of layers with an adapter or a trained copy
    is_copy: bool = False  # of `modules_to_save`


@dataclass
class WeightReport:
    """What a comparison of weights found.

    Attributes:
        differences: one for each cause, with the first module that has it.
        number: tensors that were compared.
        kept: share of the adapter's change that is in the export; None without an adapter.
    """

    differences: list[ExportFault] = field(default_factory=list)
    number: int = 0
    kept: float | None = None


def trained_weights(model: nn.Module) -> Iterator[Expected]:
    """Yields the weights of a model by the names of its base model; adapters are merged in place, layer by layer."""
    find_base: Any = getattr(model, "get_base_model", None)
    if find_base is None or not hasattr(model, "peft_config"):
        for name, tensor in model.state_dict().items():
            yield Expected(name, tensor)
        return
    base: nn.Module = find_base()
    layers = {name: (layer, adapters) for name, layer, adapters in adapted_layers(base)}
    yield from _walk(base, "", layers)


def _walk(module: nn.Module, name: str, layers: Mapping[str, tuple[nn.Module, list[Any]]]) -> Iterator[Expected]:
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    start = f"{name}." if name else ""
    if name in layers:
        layer, adapters = layers[name]
        before = {own: one.detach().clone() for own, one in layer.named_parameters()}
        merge_layer(layer, adapters)
        for own, one in layer.named_parameters():
            yield Expected(start + own, one.detach(), before[own])
        return
    if isinstance(module, ModulesToSaveWrapper):
        copies: Any = module.modules_to_save
        original = dict(module.original_module.named_parameters())
        for own, trained in copies[module.active_adapters[0]].named_parameters():
            yield Expected(start + own, trained.detach(), original.get(own), is_copy=True)
        return
    if isinstance(module, TrainableTokensWrapper):
        inner = f"{start}token_adapter"
        for found in _walk(module.token_adapter, inner, layers):
            yield found._replace(name=start + found.name.removeprefix(f"{inner}."))
        return
    kept = {own: one for own, one in module.named_buffers(recurse=False) if own in module.state_dict()}
    for own, tensor in (*module.named_parameters(recurse=False), *kept.items()):
        yield Expected(start + own, tensor.detach())
    for own, child in module.named_children():
        yield from _walk(child, start + own, layers)


def round_adapter(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights of an adapter to a type, in place; the base, and the types in memory, stay as they are."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    for module in model.modules():
        if not isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper)):
            continue
        for name, one in module.named_parameters():
            if not {"base_layer", "original_module"} & set(name.split(".")):
                one.data = one.data.to(dtype).to(one.dtype)


def compare_weights(
    trained: nn.Module,
    exported: nn.Module,
    *,
    average: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> WeightReport:
    """Compares the weights of two models; adapters on them are merged in place.

    Args:
        trained: the model as it was trained.
        exported: the model as it was loaded from the export.
        average: the averaged weights of the checkpoint, which may have been exported in their place.
        dtype: type that the files were to have; transformers loads some layers in float32 all the same.
    """
    there = {one.name: one.trained for one in trained_weights(exported)}
    tied = _tied_head(exported)
    report = WeightReport()
    causes: dict[str, list[str]] = {}
    dot = 0.0
    square = 0.0
    for one in trained_weights(trained):
        report.number += 1
        found = there.get(one.name)
        module = one.name.rpartition(".")[0] or one.name
        if found is None:
            causes.setdefault("is not in the export", []).append(module)
            continue
        if one.base is not None and not one.is_copy and found.shape == one.trained.shape:
            change = one.trained.float() - one.base.float()
            dot += float(((found.float() - one.base.float()) * change).sum())
            square += float((change * change).sum())
        if dtype is not None and found.is_floating_point() and torch.equal(found.to(dtype).to(found.dtype), found):
            found = found.to(dtype)
        cause = _differs(one, found, average or {})
        if cause and one.name == tied:
            cause = (
                "is tied to the input embeddings again (tie_word_embeddings in config.json), so that the trained head "
                "is lost"
            )
        if cause:
            causes.setdefault(cause, []).append(module)
    report.kept = dot / square if square else None
    for cause, modules in causes.items():
        more = len(dict.fromkeys(modules)) - 1
        report.differences.append(
            ExportFault(modules[0], cause + (f", as in {counted(more, 'module')} more" * (more > 0)))
        )
    if report.kept is not None and report.kept < LEAST_KEPT and not report.differences:
        report.differences.append(
            ExportFault(
                "model.safetensors",
                f"rounding keeps {report.kept:.0%} of the adapter's change, which is smaller than the distance between "
                "two numbers of this type. Export with --dtype fp32, or without --merge",
            )
        )
    return report


def _tied_head(model: nn.Module) -> str | None:
    """Returns the name of the weights of a head that is the input embeddings; None if it is not."""
    shown: Any = model
    head = shown.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or weight is not shown.get_input_embeddings().weight:
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _differs(one: Expected, found: torch.Tensor, average: Mapping[str, torch.Tensor]) -> str:
    """Returns what is wrong with an exported tensor; "" if nothing is."""
    if found.shape != one.trained.shape:
        return f"has the shape {tuple(found.shape)}, and {tuple(one.trained.shape)} was trained"
    wanted = one.trained.to(found.dtype)
    if torch.equal(wanted, found):
        return ""
    if not found.is_floating_point():
        return "differs"
    wanted = wanted.float()
    found_dtype = found.dtype
    found = found.float()
    if not bool(torch.isfinite(found).all()):
        return "has values that are not finite"
    rounding = ROUNDINGS.get(found_dtype, 0.0)
    slack = max(5 * ROUNDINGS[torch.float32], 0.05 * rounding) * float(wanted.norm())
    base = None if one.base is None else one.base.to(found_dtype).float()
    change = torch.zeros(()) if base is None else wanted - base
    size = float(change.norm())
    moved = 0.0 if one.is_copy or not change.numel() else ORDER_OF_SUM * float(change.abs().max())
    apart = (found - wanted).abs()
    is_away = apart > 2 * rounding * wanted.abs() + moved
    if not bool(is_away.any()):
        return ""
    away = float(apart.norm())
    if one.name in average and float((found - average[one.name].float().to(found_dtype).float()).norm()) <= slack:
        return "has the average of the weights, and not the trained ones"
    if base is not None and float((found - base).norm()) <= 0.05 * size + slack:
        if one.is_copy:
            return "is the base model's: the trained copy (modules_to_save) was dropped"
        return "is the base model's: the adapter is not in it"
    if one.base is not None and size and not one.is_copy:
        # Before rounding, whose errors are no part of the change.
        start = one.base.float()
        whole = one.trained.float() - start
        times = float(((found - start) * whole).sum() / (whole * whole).sum())
        rest = float((found - start - times * whole).norm())
        if abs(times - 1) > LEAST_TIMES and rest <= 0.1 * abs(times) * size + rounding * float(wanted.norm()):
            return f"has {times:.3g} times the change that was trained: another alpha or rank"
    rows = is_away.reshape(len(is_away), -1).any(dim=1) if is_away.ndim > 1 else is_away
    if 2 * int(rows.sum()) < rows.numel():
        first = int(rows.nonzero()[0])
        return f"differs from the trained layer in {int(rows.sum())} of {rows.numel()} rows, the first is {first}"
    if one.base is not None and size and not one.is_copy:
        return f"differs from the trained layer by {away / size:.2g} of its change: another rank, alpha or adapter"
    return f"differs from the trained layer by {away / max(float(wanted.norm()), 1e-30):.2g} of its size"
