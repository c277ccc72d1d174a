"""Isolation check: the layout by which a model keeps the samples of a packed row apart, found by running it.

Before step 1 the model is run once on packed rows of random tokens and once on each of their samples alone. The first
layout with which all logits agree is taken. If there is none, the samples would see each other, and packing is refused.
No list of models is kept: what a model does decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trainwright._types import Batch, output_logits
from trainwright.data.packing.collator import PackedCollator, PackingLayout, as_tensors
from trainwright.errors import ModelError
from trainwright.state.model_modes import evaluation_mode

# Difference of logits, as a share of the largest, that rounding may make.
ROUNDING = {torch.float32: 5e-5, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 6e-2}
ROUNDING_ON_A_GPU = 5e-3  # of float32, whose products may be taken in TF32


def find_layout(
    model: nn.Module, *, row_length: int, num_rows: int, takes_positions: bool, length_of: str = "input_ids"
) -> PackingLayout:
    """The layout by which this model keeps the samples of a row apart; ModelError where there is none."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(_refusal(model, "it is an encoder-decoder, which has two sequences for each sample"))
    rows = _rows_of_random_tokens(model, row_length, min(num_rows, 2), length_of)
    differences = []
    with evaluation_mode(model):
        alone = [_logits_alone(model, item, length_of) for row in rows for item in row]
        scale = max(float(one.abs().max()) for one in alone)
        for layout in _candidates(model, takes_positions):
            try:
                packed = _logits_packed(model, rows, layout, length_of)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                differences.append(f"{layout.form}: {type(error).__name__}")
                continue
            share = max(float((a - b).abs().max()) for a, b in zip(alone, packed, strict=True)) / max(scale, 1e-12)
            if share <= _tolerance(model):
                return layout
            differences.append(f"{layout.form}: {share:.1e} of the largest logit")
    found = ", ".join(dict.fromkeys(differences))
    raise ModelError(_refusal(model, f"its logits for packed samples are not those for the samples alone ({found})"))


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"packing cannot be used with {type(model).__name__}: {reason}. Drop packing; max_tokens_per_batch saves "
        "padding with every model."
    )


def _candidates(model: nn.Module, takes_positions: bool) -> Iterator[PackingLayout]:
    """Layouts to try, the one that costs least first."""
    config = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    firsts: list[int | None] = [None]
    if takes_positions:  # some count positions from behind the padding id
        firsts = [0, *([padding + 1] if padding is not None else [])]
    kernel = str(getattr(config, "_attn_implementation", ""))
    additive = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for first in firsts:
        if "flash" in kernel:
            yield PackingLayout(form="flat", first_position=first)
            continue
        if first is not None:
            yield PackingLayout(form="positions", first_position=first)
        for kind in (None, additive):
            yield PackingLayout(form="blocks", additive=kind, first_position=first)
            yield PackingLayout(form="blocks", additive=kind, causal=True, first_position=first)


def _rows_of_random_tokens(model: nn.Module, row_length: int, num_rows: int, length_of: str) -> list[list[Batch]]:
    """A row of three samples, and one of a long and a short one: windows of attention shorter than it show, too."""
    size = max(row_length // 2, 1), max(row_length // 3, 1), 1
    lengths = [[part for part in size if part], [max(row_length - 3, 1), 2]][:num_rows]
    table = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)

    def sample(length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, table.num_embeddings, (length,), generator=generator)
        tokens[tokens == padding] = (padding or 0) + 1 if (padding or 0) + 1 < table.num_embeddings else 0
        return {length_of: tokens}

    return [[sample(length) for length in row] for row in lengths]


def _logits_alone(model: nn.Module, item: dict[str, torch.Tensor], length_of: str) -> torch.Tensor:
    return _logits(model, {name: value[None] for name, value in item.items()}, item[length_of].numel())[0]


def _logits_packed(
    model: nn.Module, rows: list[list[Batch]], layout: PackingLayout, length_of: str
) -> list[torch.Tensor]:
    batch = PackedCollator(as_tensors, layout, length_of=length_of)(rows)
    logits = _logits(model, batch, batch[length_of].shape[1])
    lengths = [[item[length_of].numel() for item in row] for row in rows]
    if layout.form == "flat":
        return list(torch.split_with_sizes(logits[0], [length for row in lengths for length in row]))
    return [
        part for one, row in zip(logits, lengths, strict=True) for part in torch.split_with_sizes(one[: sum(row)], row)
    ]


def _logits(model: nn.Module, batch: Batch, width: int) -> torch.Tensor:
    device = next(model.parameters()).device
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    # The class's own forward: for a run the instance may have one under autocast, whose rounding would hide much.
    outputs = type(model).forward(model, **placed)
    try:
        logits = output_logits(outputs)
    except (KeyError, IndexError):
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[1] != width:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else "none"
        raise ModelError(
            _refusal(model, f"it has no logits for each token (their shape: {shape}), so a row has one answer at most")
        )
    return logits.float()


def _tolerance(model: nn.Module) -> float:
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    rounding = ROUNDING.get(parameter.dtype, max(ROUNDING.values()))
    return rounding if parameter.device.type == "cpu" else max(rounding, ROUNDING_ON_A_GPU)
