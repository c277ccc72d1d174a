"""Sequences in parts: which tokens a process has, the masks of its queries, and attention over the whole sequence.

A batch is cut where it enters the model; the loss, and outputs that are read, are put together where they leave it, so
the code around the model sees whole batches. In between, every layer works on tokens one by one, but for the attention,
which transformers lets others replace by name (`AttentionInterface`).

    cp   A sequence of 2 x size chunks: rank r has chunks r and 2 x size - 1 - r, so that all have equally much of the
         triangle below a causal mask. Its queries see the keys and values of all, which are gathered.
         Source: Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.
    sp   Rank r has the r-th of `size` pieces. Before the attention the ranks exchange heads for tokens, so that each
         has all tokens of some heads, and after it back. Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses).

Gradients. Let C ranks share a sequence, and L_r be the part of the loss L = L_1 + ... + L_C that the labels of rank r
make. An engine averages gradients over all processes, so each rank has to differentiate C x L_r: the mean over the
ranks is then the gradient of L. `_SumOfParts` returns L on each rank, and multiplies by C on the way back.
`_JoinedParts` puts outputs together, from which each rank computes the same L: the gradient of its own part, times C.
Worked example, C = 2, one weight w, L_1 = 2w, L_2 = 3w: the ranks' gradients are 4 and 6, and their mean is 5.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from trainwright._types import IGNORE_INDEX
from trainwright.errors import DataError, ModelError
from trainwright.support.model_facts import auxiliary_coefficient, forward_parameters
from trainwright.support.signatures import read_signature
from trainwright.support.tensor_tree import map_nested

MaskFunction: TypeAlias = Callable[[Any, Any, Any, Any], Any]  # (row, head, query, key) -> may it be seen
Attention: TypeAlias = Callable[..., tuple[torch.Tensor, Any]]

BALANCE = "load_balancing_loss_func"  # name of the function in transformers' models
PREFIX = "parts_of_"  # begins the names under which transformers knows the attention of this module
WHOLE_NUMBERS = (torch.bool, torch.int32, torch.int64)  # types of masks and positions
NO_CUT = ("attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch")  # handled one by one


@dataclass(slots=True)
class WholeBatch:
    """Facts for the masks about the batch that the model is computing in parts.

    Attributes:
        length: tokens of a row, as the batch came.
        filled: the same, filled up so that all processes have equally many.
        own: positions in the row of the tokens of this process, (filled / size).
        order: positions in the row of the tokens of all processes, one process after the other, (filled).
        inverse: where in `order` each position is, (filled).
        seen: (batch, filled), True for tokens that are no padding; None: none was masked.
        samples: (batch, filled), number of the sample in its row; None: each row is one sample.
        positions: (batch, filled), position ids; only read where there are samples.
        num_rows: rows of the batch.
    """

    length: int
    filled: int
    own: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    seen: torch.Tensor | None
    samples: torch.Tensor | None
    positions: torch.Tensor
    num_rows: int

    def placed(self, function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> MaskFunction:
        """Returns a mask function of indices into `queries` and `keys`, which hold positions in the row."""
        samples = self.samples
        positions = self.positions
        seen = self.seen
        length = self.length if self.filled > self.length else None

        def mask_places(row: Any, head: Any, query: Any, key: Any) -> Any:
            at = queries[query]
            other = keys[key]
            if samples is None:
                shown = function(row, head, at, other)
            else:  # positions count from the beginning of each sample
                shown = function(row, head, positions[row, at], positions[row, other])
                shown = shown & (samples[row, at] == samples[row, other])
            if seen is not None:
                shown = shown & seen[row, other]
            return shown if length is None else shown & (other < length)

        return mask_places

    def without_fill(self, mask: Any, keys: torch.Tensor) -> Any:
        """Returns a mask in which the tokens that fill rows up count for nothing, not even where all keys are hidden.

        A query without a key that it may see, as padding on the left has, gets the mean of all values from a mask that
        is added to the scores.
        """
        if self.filled == self.length or not isinstance(mask, torch.Tensor) or not mask.is_floating_point():
            return mask
        return mask.masked_fill(keys >= self.length, -torch.inf)


class Share(ABC):
    """The share that one process of a group has of each sequence."""

    setting: str  # field of accelerate's ParallelismConfig
    stands_in = False  # tensors have no memory, for a plan of it

    def __init__(self, group: Any, *, size: int, place: int) -> None:
        self.group = group  # a ProcessGroup of `size` ranks
        self.size = size
        self.place = place

    @property
    @abstractmethod
    def multiple(self) -> int:
        """Sequences are filled up to a multiple of this number of tokens."""

    @abstractmethod
    def positions(self, length: int, place: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of the tokens that one process has of a sequence of this length."""

    @abstractmethod
    def mask(self, make: Callable[..., Any], base: str, batch: WholeBatch, asked: dict[str, Any]) -> Any:
        """Returns the mask of a forward pass, for `attend`.

        Args:
            make: makes a mask in the form that the attention `base` takes.
            base: name of the attention.
            batch: whose parts are in the model.
            asked: arguments with which the model would have called `make`.
        """

    @abstractmethod
    def attend(
        self,
        base: Attention,
        module: Any,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        """Returns the attention of this process's tokens, (batch, own tokens, heads, size of a head), and None.

        Args:
            base: the attention itself.
            module: the layer that calls it.
            states: queries, keys and values of its tokens, (batch, heads, own tokens, size of a head).
            mask: from `mask`, or from the batch.
            options: more keywords of the call.
        """

    @abstractmethod
    def own_rows(self, mask: torch.Tensor, batch: WholeBatch) -> torch.Tensor:
        """Returns the part that `attend` needs of a whole mask, (batch, heads or 1, filled, filled)."""


class ContextShare(Share):
    """Queries of one chunk from the front and one from the back; keys and values of all are gathered."""

    setting = "cp_size"

    @property
    def multiple(self) -> int:
        return 2 * self.size

    def positions(self, length: int, place: int, device: torch.device) -> torch.Tensor:
        chunk = length // (2 * self.size)
        head = torch.arange(place * chunk, (place + 1) * chunk, device=device)
        return torch.cat([head, length - 1 - head.flip(0)])

    def mask(self, make: Callable[..., Any], base: str, batch: WholeBatch, asked: dict[str, Any]) -> Any:
        if base == "sdpa" and is_plainly_causal(batch, asked):
            return None
        function = batch.placed(_find_function(asked), batch.own, batch.order)
        sizes = {"q_length": len(batch.own), "kv_length": batch.filled, "q_offset": 0, "kv_offset": 0}
        asked = {**asked, **sizes, "mask_function": function, "attention_mask": None, "allow_is_causal_skip": False}
        return batch.without_fill(make(**asked), batch.order)

    def attend(
        self,
        base: Attention,
        module: Any,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        query, key, value = states
        gathered = _GatheredParts.apply(torch.cat([key, value], dim=-1), self.group)  # type: ignore[no-untyped-call]
        keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if mask is not None or not is_causal:
            rows = [part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in (keys, values)]
            return base(module, query, *rows, mask, **options)
        return self._causal(base, module, query, (keys, values), options)

    def _causal(
        self,
        base: Attention,
        module: Any,
        query: torch.Tensor,
        parts: tuple[torch.Tensor, torch.Tensor],
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        """Attends with each of the two chunks to the tokens before it, without a mask or work on masked tokens."""
        from torch.nn.attention.bias import causal_lower_right

        chunk = query.shape[2] // 2
        if self.stands_in:  # torch makes no such bias of a stand-in; its kernels for GPUs take as little memory
            options = {**options, "is_causal": True}
        outputs = []
        for half, number in enumerate((self.place, 2 * self.size - 1 - self.place)):
            keys, values = (torch.cat(self._before(part, number + 1, chunk), dim=2) for part in parts)
            queries = query[:, :, half * chunk : (half + 1) * chunk]
            # A single query sees all keys.
            bias = causal_lower_right(chunk, keys.shape[2]) if chunk > 1 and not self.stands_in else None
            outputs.append(base(module, queries, keys, values, bias, **options)[0])
        return torch.cat(outputs, dim=1), None

    def _before(self, gathered: torch.Tensor, count: int, chunk: int) -> list[torch.Tensor]:
        """Returns the first chunks of the sequence, in order, from a tensor (rank, batch, heads, tokens, size)."""
        return [
            gathered[i, :, :, :chunk] if i < self.size else gathered[2 * self.size - 1 - i, :, :, chunk:]
            for i in range(count)
        ]

    def own_rows(self, mask: torch.Tensor, batch: WholeBatch) -> torch.Tensor:
        return mask[:, :, batch.own][..., batch.order]


class HeadShare(Share):
    """A piece of the sequence in each layer but the attention, which has all of it for a part of the heads."""

    setting = "sp_size"

    @property
    def multiple(self) -> int:
        return self.size

    def positions(self, length: int, place: int, device: torch.device) -> torch.Tensor:
        piece = length // self.size
        return torch.arange(place * piece, (place + 1) * piece, device=device)

    def mask(self, make: Callable[..., Any], base: str, batch: WholeBatch, asked: dict[str, Any]) -> Any:
        sizes = {"q_length": batch.filled, "kv_length": batch.filled, "q_offset": 0, "kv_offset": 0}
        if is_plainly_causal(batch, asked):
            return make(**{**asked, **sizes, "attention_mask": None})
        places = torch.arange(batch.filled, device=batch.own.device)
        function = batch.placed(_find_function(asked), places, places)
        asked = {**asked, **sizes, "mask_function": function, "attention_mask": None, "allow_is_causal_skip": False}
        return batch.without_fill(make(**asked), places)

    def attend(
        self,
        base: Attention,
        module: Any,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        query, key, value = states
        num_heads = query.shape[1]
        num_kv = key.shape[1]
        if num_heads % self.size:
            raise ModelError(uneven_heads(num_heads, self.size))
        if num_kv % self.size:  # each process gets a copy of the heads that its queries need
            copies = math.lcm(num_kv, self.size) // num_kv
            key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
        query, key, value = self._all_tokens((query, key, value))
        own_heads = slice(self.place * query.shape[1], (self.place + 1) * query.shape[1])
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] == num_heads > 1:
            mask = mask[:, own_heads]
        if isinstance(options.get("s_aux"), torch.Tensor):
            options = {**options, "s_aux": options["s_aux"][own_heads]}
        some = HeadsOf(module, groups=query.shape[1] // key.shape[1], own=own_heads)
        output = base(some, query, key, value, mask, **options)[0]
        rows = output.unflatten(1, (self.size, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
        back = _ExchangedParts.apply(rows, self.group)  # type: ignore[no-untyped-call]
        # from (part of the heads, batch, own tokens, heads, size) to (batch, own tokens, all heads, size)
        return back.permute(1, 2, 0, 3, 4).flatten(2, 3), None

    def _all_tokens(self, states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Exchanges heads for tokens: (batch, heads, own tokens, size) -> (batch, own heads, tokens, size)."""
        by_rank = [part.unflatten(1, (self.size, -1)).transpose(0, 1) for part in states]  # type: ignore[no-untyped-call]
        if len({part.shape[-1] for part in states}) == 1:  # one exchange for all three
            counts = [part.shape[2] for part in by_rank]
            exchanged = _ExchangedParts.apply(torch.cat(by_rank, dim=2), self.group).split(counts, dim=2)  # type: ignore[no-untyped-call]
        else:
            exchanged = tuple(_ExchangedParts.apply(part, self.group) for part in by_rank)  # type: ignore[no-untyped-call]
        return [part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in exchanged]

    def own_rows(self, mask: torch.Tensor, batch: WholeBatch) -> torch.Tensor:
        return mask


class HeadsOf:
    """A layer as an attention function sees it that has a part of its heads."""

    def __init__(self, module: Any, *, groups: int, own: slice) -> None:
        self._module = module
        self.num_key_value_groups = groups  # queries for each key
        if isinstance(getattr(module, "sinks", None), torch.Tensor):  # one number for each head
            self.sinks = module.sinks[own]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def uneven_heads(num_heads: int, size: int) -> str:
    """Returns the sentence for a number of heads that cannot be shared evenly."""
    return (
        f"parallelism_config.sp_size={size} shares out heads of attention, and {num_heads} heads cannot be shared "
        "evenly. Use a size that divides them, or cp_size, which does not share heads."
    )


def is_plainly_causal(batch: WholeBatch, asked: Mapping[str, Any]) -> bool:
    """Returns True if a mask hides nothing but later tokens."""
    from transformers.masking_utils import causal_mask_function

    is_causal = _find_function(asked) is causal_mask_function and asked.get("allow_is_causal_skip", True)
    return bool(is_causal) and batch.seen is None and batch.samples is None


def _find_function(asked: Mapping[str, Any]) -> MaskFunction:
    from transformers.masking_utils import causal_mask_function

    function: MaskFunction = asked.get("mask_function", causal_mask_function)
    return function


# -- collectives with gradients ----------------------------------------------------------------------------------------


# Since torch 2.13 under new names, of which the older ones warn.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _GatheredParts(torch.autograd.Function):
    """Stacks a tensor of each process along a new first dimension; each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        part = part.contiguous()
        stacked = part.new_empty((dist.get_world_size(group), *part.shape))
        _gather_into(stacked.flatten(0, 1), part, group=group)
        return stacked

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        own = gradient.new_empty(gradient.shape[1:])
        _scatter_sums(own, gradient.flatten(0, 1), group=ctx.group)
        return own, None


class _ExchangedParts(torch.autograd.Function):
    """Sends the i-th entry of the first dimension to process i, and returns the received entries in rank order."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: torch.Tensor, group: Any) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _SumOfParts(torch.autograd.Function):
    """Sum over the processes of a group; see the head of this file for its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.size = dist.get_world_size(group)
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.size, None


class _JoinedParts(torch.autograd.Function):
    """Stacks a tensor of each process; see the head of this file for its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        part = part.contiguous()
        stacked = part.new_empty((share.size, *part.shape))
        _gather_into(stacked.flatten(0, 1), part, group=share.group)
        return stacked

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][ctx.share.place] * ctx.share.size, None


# -- cutting and joining -----------------------------------------------------------------------------------------------


class SequenceParts:
    """Cuts the batches of one engine, and puts outputs together."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.batch: WholeBatch | None = None  # its parts are in the model; None: the model has a whole batch
        self.joins_outputs = True  # outputs are put together, not only the loss
        self.looks = Looks()

    @contextmanager
    def used(self, *, joins_outputs: bool) -> Iterator[None]:
        """While it lasts, models with the hooks of `attach` get parts of their batches."""
        global _current
        before = _current, self.batch, self.joins_outputs
        _current = self
        self.batch = None
        self.joins_outputs = joins_outputs
        try:
            yield
        finally:
            _current, self.batch, self.joins_outputs = before

    def cut(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Returns the keywords of a forward pass for the tokens of this process.

        Labels are shifted before they are cut, because the label of a token may be in the part of another process.
        """
        inputs = {**dict(zip(forward_parameters(model), args, strict=False)), **given}
        main = next((inputs[n] for n in ("input_ids", "inputs_embeds") if inputs.get(n) is not None), None)
        if not isinstance(main, torch.Tensor) or main.ndim < 2:
            raise DataError(
                f"{self.share.setting} cuts sequences, and the batch has no input_ids of shape (rows, tokens); it has "
                f"{', '.join(inputs)}."
            )
        batch = self.batch = self._whole(main, inputs)
        part: dict[str, Any] = {}
        for name, value in inputs.items():
            if name in NO_CUT or not isinstance(value, torch.Tensor) or value.ndim == 0:
                part[name] = value
            elif value.shape[:2] == (batch.num_rows, batch.length):
                part[name] = self._own(value, fill=0)
            else:
                raise DataError(
                    f"{self.share.setting} cuts sequences, and the batch's {name} of shape {tuple(value.shape)} has "
                    f"not a value for each of its {batch.num_rows} x {batch.length} tokens. Leave {name} out, or train "
                    "with fsdp or tp_size instead."
                )
        part["position_ids"] = batch.positions[:, batch.own]
        part["attention_mask"] = self._own_mask(inputs.get("attention_mask"), main)
        if "use_cache" in forward_parameters(model):
            part.setdefault("use_cache", False)
        self._cut_labels(inputs, part)
        return part

    def _whole(self, main: torch.Tensor, inputs: Mapping[str, Any]) -> WholeBatch:
        num_rows, length = main.shape[:2]
        share = self.share
        filled = -(-length // share.multiple) * share.multiple
        device = main.device
        order = torch.cat([share.positions(filled, place, device) for place in range(share.size)])
        mask = inputs.get("attention_mask")
        positions = inputs.get("position_ids")
        samples = seen = None
        if positions is None:
            positions = torch.arange(length, device=device)[None]
        elif positions.ndim != 2 or positions.shape[1] != length:
            raise DataError(
                f"{share.setting} cuts sequences, and position_ids of shape {tuple(positions.shape)} are not one "
                f"number for each of {length} tokens. Train this model with fsdp or tp_size instead."
            )
        elif mask is None and self.looks.begins_again(positions):  # transformers takes a row with a mask for one sample
            samples = _filled(_starts(positions).cumsum(1).expand(num_rows, -1), filled)
        if mask is not None and mask.ndim == 2 and self.looks.has_zeros(mask):
            seen = pad(mask != 0, (0, filled - length), value=False)
        return WholeBatch(
            length=length,
            filled=filled,
            own=share.positions(filled, share.place, device),
            order=order,
            inverse=torch.argsort(order),
            seen=seen,
            samples=samples,
            positions=_filled(positions.expand(num_rows, -1), filled),
            num_rows=num_rows,
        )

    def _own(self, whole: torch.Tensor, *, fill: int) -> torch.Tensor:
        batch = self.batch
        assert batch is not None
        missing = batch.filled - batch.length
        sides = [0, 0] * (whole.ndim - 2) + [0, missing]
        return (pad(whole, sides, value=fill) if missing else whole)[:, batch.own].contiguous()

    def _own_mask(self, mask: torch.Tensor | None, main: torch.Tensor) -> torch.Tensor:
        """Returns the mask that the model gets: of tokens, or the rows of a mask of each token for each token.

        There is always one, so that a model does not look for the beginnings of samples in a part of a row.
        """
        batch = self.batch
        assert batch is not None
        if mask is None:
            return torch.ones((batch.num_rows, len(batch.own)), dtype=torch.long, device=main.device)
        if mask.ndim == 2:
            return self._own(mask, fill=0)
        if mask.ndim != 4 or mask.shape[2:] != (batch.length, batch.length):
            raise DataError(
                f"{self.share.setting} cuts sequences, and the attention_mask of shape {tuple(mask.shape)} is neither "
                f"one of {batch.length} tokens nor one of each token for each token."
            )
        if missing := batch.filled - batch.length:  # tokens that fill up are hidden, and see everything
            is_shown = mask.dtype == torch.bool
            hidden = False if is_shown else torch.finfo(mask.dtype).min
            mask = pad(pad(mask, (0, missing), value=hidden), (0, 0, 0, missing), value=True if is_shown else 0)
        return self.share.own_rows(mask, batch)

    def _cut_labels(self, inputs: Mapping[str, Any], part: dict[str, Any]) -> None:
        shifted = inputs.get("shift_labels")
        if shifted is None and inputs.get("labels") is not None:
            shifted = pad(inputs["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        if shifted is None:
            return
        own = self._own(shifted, fill=IGNORE_INDEX)
        part["labels"] = part["shift_labels"] = own
        if inputs.get("num_items_in_batch") is None:  # the mean over all parts, as of the whole batch
            part["num_items_in_batch"] = shifted.ne(IGNORE_INDEX).sum().float()

    def join(self, model: nn.Module, inputs: Mapping[str, Any], outputs: Any) -> Any:
        """Returns the output of a forward pass with the loss of the whole batch, and outputs of all tokens if wanted.

        Outputs are put together if the model has computed no loss: the caller computes it from them.
        """
        batch = self.batch
        assert batch is not None
        has_loss = inputs.get("labels") is not None
        if not has_loss or self.joins_outputs:
            routes = outputs.get("router_logits") if isinstance(outputs, Mapping) else None
            outputs = map_nested(self._joined, outputs)
            if isinstance(routes, tuple):  # tokens of all rows one after the other
                by_row = (layer.unflatten(0, (batch.num_rows, -1)) for layer in routes)
                outputs["router_logits"] = tuple(self._joined(layer).flatten(0, 1) for layer in by_row)
        if not has_loss:
            return outputs
        if not isinstance(outputs, Mapping):
            return (self._whole_loss(outputs[0]), *outputs[1:])
        loss = outputs["loss"]
        balance = outputs.get("aux_loss")
        coefficient = auxiliary_coefficient(model)
        if balance is None or coefficient == 0.0:
            outputs["loss"] = self._whole_loss(loss)  # type: ignore[index]
        else:  # every process has that of all tokens: see `balance_over_parts`
            part = coefficient * balance.to(loss.device)
            outputs["loss"] = self._whole_loss(loss - part) + part  # type: ignore[index]
        return outputs

    def _joined(self, leaf: Any) -> Any:
        batch = self.batch
        assert batch is not None
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:2] != (batch.num_rows, len(batch.own)):
            return leaf
        parts = _JoinedParts.apply(leaf, self.share)  # type: ignore[no-untyped-call]
        return parts.transpose(0, 1).flatten(1, 2)[:, batch.inverse[: batch.length]]

    def whole_routes(self, routes: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Returns the routers' logits of all tokens, by layer, gathered from all processes, and which tokens count.

        Args:
            routes: for each layer (batch x own tokens, experts).

        Returns:
            For each layer (batch x filled, experts), and (batch, filled), 1 for tokens that are no padding. The tokens
            of a row are in the order of processes.
        """
        batch = self.batch
        assert batch is not None
        own = torch.stack([layer.to(routes[0].device) for layer in routes])
        parts = _JoinedParts.apply(own, self.share).unflatten(2, (batch.num_rows, -1))  # type: ignore[no-untyped-call]
        whole = parts.permute(1, 2, 0, 3, 4).flatten(1, 3)  # (layers, batch x filled, experts)
        shown = batch.order < batch.length
        counts = shown.expand(batch.num_rows, -1) if batch.seen is None else batch.seen[:, batch.order] & shown
        return tuple(whole), counts.long()

    def _whole_loss(self, loss: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _SumOfParts.apply(loss, self.share.group)  # type: ignore[no-untyped-call]
        return whole


def _starts(positions: torch.Tensor) -> torch.Tensor:
    """Returns where samples begin in rows of positions, but at the beginning of a row: a mask of the same shape."""
    return torch.diff(positions, prepend=positions[:, :1] - 1) != 1


class Looks:
    """Looks at tensors of batches before they are copied to a device, so that no step waits for it.

    A mask or positions that came in another way (a batch that is not pinned, or that somebody changed on the device)
    are looked at where they are.
    """

    def __init__(self) -> None:
        # A tensor on the device -> (has_zeros, begins_again).
        self._known: MutableMapping[torch.Tensor, tuple[bool, bool]] = WeakTensorKeyDictionary()

    def noting(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that copies a tensor and remembers its looks, as long as the copy is there."""

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            moved = copy(tensor)
            if tensor.ndim == 2 and tensor.dtype in WHOLE_NUMBERS:
                self._known[moved] = _has_zeros(tensor), _begins_again(tensor)
            return moved

        return noted

    def has_zeros(self, mask: torch.Tensor) -> bool:
        """Returns whether a mask (rows, tokens) hides tokens."""
        known = self._known.get(mask)
        return _has_zeros(mask) if known is None else known[0]

    def begins_again(self, positions: torch.Tensor) -> bool:
        """Returns whether a row of positions (rows, tokens) has more than one sample."""
        known = self._known.get(positions)
        return _begins_again(positions) if known is None else known[1]


def _has_zeros(mask: torch.Tensor) -> bool:
    return bool((mask == 0).any())


def _begins_again(positions: torch.Tensor) -> bool:
    return positions.dtype != torch.bool and bool(_starts(positions).any())


def _filled(values: torch.Tensor, length: int) -> torch.Tensor:
    """Fills rows up to a length with their last value."""
    missing = length - values.shape[1]
    return torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1) if missing else values


# -- in the model ------------------------------------------------------------------------------------------------------

# The parts that are in use; None: whatever goes through a model is whole. Not of one thread: recomputed activations
# come from the threads of the backward pass.
_current: SequenceParts | None = None


def attach(model: nn.Module, core: Any) -> None:
    """Has a model take and return whole batches, and work on parts of them, while a `SequenceParts` is used.

    Args:
        model: as it is called, perhaps with adapters around it.
        core: the model of transformers in it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    base = read_attention(core)
    if not base.startswith(PREFIX):
        AttentionInterface.register(PREFIX + base, functools.partial(attention_in_parts, base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(PREFIX + base, functools.partial(mask_in_parts, base))
        core.set_attn_implementation(PREFIX + base)
    for names in find_namespaces(core):
        balance = names.get(BALANCE)
        if balance is not None and getattr(balance, "func", None) is not balance_over_parts:
            names[BALANCE] = functools.partial(balance_over_parts, balance)
    if not getattr(model, "takes_parts_of_sequences", False):
        model.takes_parts_of_sequences = True  # type: ignore[assignment]
        model.register_forward_pre_hook(cut_inputs, with_kwargs=True)
        model.register_forward_hook(join_outputs, with_kwargs=True)


def read_attention(core: Any) -> str:
    """Returns the name of the attention of a model of transformers."""
    return str(getattr(getattr(core, "config", None), "_attn_implementation", None))


# A model's keys and values of earlier tokens; transformers uses the second name from 5.24 on.
CACHE_NAMES = ("past_key_values", "cache")


def cut_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook before the forward pass of a model."""
    parts = _current
    if parts is None:
        return None
    if any(kwargs.get(name) is not None for name in CACHE_NAMES):  # one token after the other
        parts.batch = None
        return None
    return (), parts.cut(model, args, kwargs)


def join_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Hook after the forward pass of a model."""
    parts = _current
    return outputs if parts is None or parts.batch is None else parts.join(model, kwargs, outputs)


def attention_in_parts(
    base: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """The attention of a layer: as `base` if the batch is whole, otherwise over the parts of all processes."""
    function = base_attention(base, module)
    parts = _current
    if parts is None or parts.batch is None:
        return function(module, query, key, value, attention_mask, **options)
    if query.shape[2] != len(parts.batch.own):
        raise ModelError(
            f"A layer of the model was called with {query.shape[2]} tokens beside the parts of a batch, of which this "
            f"process has {len(parts.batch.own)}. With {parts.share.setting}, call the model, not a module in it."
        )
    return parts.share.attend(function, module, (query, key, value), attention_mask, options)


def base_attention(base: str, module: Any) -> Attention:
    """Returns the function that a layer would call by itself; each model of transformers has its own "eager" one."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for names in find_namespaces(module):
        interface = names.get("ALL_ATTENTION_FUNCTIONS")
        if interface is not None:
            function: Attention | None = interface.get(base) or names.get("eager_attention_forward")
            if function is not None:
                return function
    return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]


def find_namespaces(instance: object) -> Iterator[dict[str, Any]]:
    """Yields the names in each Python module that defines a class of an instance, the innermost class first."""
    for cls in type(instance).__mro__:
        if cls.__module__ in sys.modules:
            yield vars(sys.modules[cls.__module__])


def balance_over_parts(function: Callable[..., Any], routes: Any, *args: Any, **options: Any) -> Any:
    """The balance of a mixture of experts, which is no sum over tokens: that of all parts of a batch.

    Args:
        function: computes it, as the model would call it.
        routes: for each layer the logits of the router, (tokens, experts).
        args: number of experts, experts of a token, the mask of the part, by position or by name.
        options: the same by name.
    """
    parts = _current
    if parts is None or parts.batch is None or not isinstance(routes, tuple) or not routes:
        return function(routes, *args, **options)
    whole, counts = parts.whole_routes(routes)
    signature = read_signature(function)
    if signature is None:  # as transformers calls it: the mask is the last argument
        return function(whole, *args[:2], **{**options, "attention_mask": counts})
    call = signature.bind(routes, *args, **options)
    call.arguments[next(iter(call.arguments))] = whole
    call.arguments["attention_mask"] = counts
    return function(*call.args, **call.kwargs)


def mask_in_parts(base: str, **asked: Any) -> Any:
    """The mask of a forward pass: as for `base` if the batch is whole, otherwise for the queries of this process."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    make = ALL_MASK_ATTENTION_FUNCTIONS[base]
    parts = _current
    if parts is None or parts.batch is None:
        return make(**asked)
    return parts.share.mask(make, base, parts.batch, asked)
