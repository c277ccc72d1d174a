"""Attention within each document of packed rows, without a mask for each pair of tokens.

transformers knows this attention as `sdpa_by_document`. It is the library's own `sdpa`, except for batches whose
`attention_mask` is a tensor made by `make_document_ends`: a model hands a mask of four dimensions to its layers as it
is. Then attention is computed for one document after the other, or on a CUDA device by torch's kernel for documents of
different lengths. So a model that has this attention evaluates and generates as before.

    row of 8 tokens, documents of 3 and 4 tokens, 1 token of padding     ends: 3, 7, 8, 8, ...
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.distributed.device import get_kind
from trainwright.support.model_facts import core_model
from trainwright.support.patches import read_attention

BASE = "sdpa"
HALF = (torch.float16, torch.bfloat16)
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Arguments of a model's settings with a probability of dropout in attention.
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
MIN_BLOCK = 512  # queries that a layer with a window computes together


class AttentionName(str):
    """Name of an attention function of this process; another process, or a file, gets the name of its base."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (BASE,)

    def __deepcopy__(self, memo: dict[int, object]) -> AttentionName:
        return self


NAME = AttentionName("sdpa_by_document")


def register() -> None:
    """Makes the attention known to transformers, under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    # A compiler cannot follow a loop over lengths. This imports the compiler, so it is not done for every run.
    attend_each = torch.compiler.disable(_attend_each)  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, functools.partial(attend_by_document, attend_each))
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[BASE])


# -- whether it can be used --------------------------------------------------------------------------------------------


def can_attend_by_document(model: nn.Module, *, row_length: int, half: torch.dtype | None) -> bool:
    """Returns whether it is worth a proof that a model's packed rows can be computed by document.

    Args:
        model: on its device, with the weights of training.
        row_length: most tokens of a row.
        half: 16-bit type in which the run computes; None: it computes in the type of the weights.
    """
    core = core_model(model)
    if read_attention(core) not in (BASE, NAME):
        return False
    config = core.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if not layers <= KNOWN_LAYERS:
        return False
    weight = next(p for p in model.parameters() if p.is_floating_point())
    window = getattr(config, "sliding_window", None) or row_length
    # The tolerance for 16-bit weights is too wide to prove that all layers keep to a window.
    if weight.dtype in HALF and window < row_length:
        return False
    if not get_kind(weight.device).is_accelerator:
        return True
    has_dropout = any(getattr(config, name, None) for name in DROPOUTS)
    return has_kernel(weight.device) and (half or weight.dtype) in HALF and not has_dropout


def has_kernel(device: torch.device) -> bool:
    """Returns whether torch has attention of different lengths with windows on a device; torch 2.10 has none."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return get_kind(device).attends_by_length and {"window_size", "scale"} <= parameters.keys()


def use_document_attention(model: nn.Module) -> None:
    """Gives a model of transformers this attention."""
    register()
    core_model(model).set_attn_implementation(NAME)


def restore_attention(model: nn.Module) -> None:
    """Gives a model its former attention back."""
    core_model(model).set_attn_implementation(BASE)


# -- the ends of documents ---------------------------------------------------------------------------------------------


def make_document_ends(row_lengths: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Returns where the documents of rows end: (rows, 1, power, number), int32.

    Padding is one more document. The number is a power of two, so that batches have few different shapes; the rest
    repeats the row's end. No document has more than 2 ** power tokens: a kernel needs a limit, and a shape can be read
    without waiting for a device. All entries along that dimension are equal.

    Args:
        row_lengths: tokens of the documents in each row.
        width: tokens of a row, with padding.
    """
    longest = max(map(len, row_lengths)) + 1
    number = 1 << max(longest - 1, 15).bit_length()
    ends = [[*itertools.accumulate(lengths)] for lengths in row_lengths]
    filled = [[*row, *[width] * (number - len(row))] for row in ends]
    most = max(max(max(lengths), width - sum(lengths)) for lengths in row_lengths)
    power = max(most - 1, 1).bit_length()
    return torch.tensor(filled, dtype=torch.int32)[:, None, None].repeat(1, 1, power, 1)


def is_document_ends(mask: object) -> bool:
    """Returns whether a mask was made by `make_document_ends`; torch's attention takes none of whole numbers."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32 and mask.ndim == 4


# -- attention ---------------------------------------------------------------------------------------------------------


def attend_by_document(
    attend_each: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # keywords that the layers of different models give
) -> tuple[torch.Tensor, None]:
    """Returns the attention of a layer, (batch, tokens, heads, size of a head), and None; see the module.

    Args:
        attend_each: `_attend_each`, as a compiler calls it.
        module: the layer.
        query: (batch, heads, tokens, size of a head).
        key: likewise, perhaps with fewer heads.
        value: like `key`.
        attention_mask: ends of documents, or a mask for `sdpa`.
        options: among them `dropout`, `scaling`, `is_causal` and `sliding_window`.
    """
    if attention_mask is None or not is_document_ends(attention_mask):
        return _attend(module, query, key, value, attention_mask, **options)
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = options.get("sliding_window")
    if window is not None and window < query.shape[2] and not is_causal:
        # torch refuses the ends, so the proof goes on to a mask: models count such windows in different ways
        return _attend(module, query, key, value, attention_mask, **options)
    states = (query, key, value)
    dtype = _find_dtype(query)
    is_plain = not options.get("dropout") and options.get("position_bias") is None
    if is_plain and dtype in HALF and get_kind(query.device).attends_by_length:
        cast = [state.to(dtype) for state in states]
        sides = (-1, -1)
        if is_causal:
            sides = (-1 if window is None else window - 1, 0)
        return _attend_in_kernel(cast, attention_mask, scale=options.get("scaling"), sides=sides), None
    return attend_each(module, states, attention_mask, window if is_causal else None, options), None


def _find_dtype(query: torch.Tensor) -> torch.dtype:
    """Returns the type in which torch's own attention would compute, under autocast too."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,  # as in `attend_by_document`
) -> tuple[torch.Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[BASE](module, query, key, value, mask, **options)
    return result


def _attend_in_kernel(
    states: Sequence[torch.Tensor], ends: torch.Tensor, *, scale: float | None, sides: tuple[int, int]
) -> torch.Tensor:
    """Computes all documents of all rows at once; nothing is read back from the device.

    `sides`: tokens that a query sees on its left and on its right; -1: all.
    """
    from torch.nn.attention.varlen import varlen_attn

    num_rows, num_heads, width, _ = states[0].shape
    first = torch.arange(num_rows, device=ends.device, dtype=torch.int32)[:, None] * width
    bounds = torch.nn.functional.pad((ends[:, 0, 0] + first).flatten(), (1, 0))
    most = min(1 << ends.shape[2], width)
    groups = num_heads // states[1].shape[1]
    parts = [states[0]]
    for part in states[1:]:
        parts.append(part.repeat_interleave(groups, dim=1) if groups > 1 else part)
    queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    # Any: with other arguments the kernel returns a tuple
    output: Any = varlen_attn(queries, keys, values, bounds, bounds, most, most, scale=scale, window_size=sides)
    whole: torch.Tensor = output.unflatten(0, (num_rows, width))
    return whole


def _attend_each(
    module: nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    window: int | None,
    options: dict[str, Any],  # as in `attend_by_document`
) -> torch.Tensor:
    """Computes one document after the other."""
    rows = []
    for row, stops in enumerate(ends[:, 0, 0].tolist()):
        lengths = [stop - start for start, stop in itertools.pairwise([0, *stops]) if stop > start]
        documents = zip(*(torch.split_with_sizes(part[row : row + 1], lengths, dim=2) for part in states), strict=True)
        rows += [_attend_one(module, document, window, options) for document in documents]
    whole = torch.cat(rows, dim=1)[0]
    return whole.unflatten(0, (len(ends), -1))  # type: ignore[no-untyped-call, no-any-return]


def _attend_one(
    module: nn.Module, document: tuple[torch.Tensor, ...], window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """Computes one document, a block of queries after the other if it is longer than the window."""
    query, key, value = document
    length = query.shape[2]
    if window is None or length <= window:
        return _attend(module, query, key, value, None, **options)[0]
    block = max(window, MIN_BLOCK)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(start - window + 1, 0)
        distances = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
        seen = ((distances >= 0) & (distances < window)).to(query.device)
        queries = query[:, :, start:stop]
        keys = key[:, :, first:stop]
        values = value[:, :, first:stop]
        outputs.append(_attend(module, queries, keys, values, seen[None, None], **options)[0])
    return torch.cat(outputs, dim=1)
