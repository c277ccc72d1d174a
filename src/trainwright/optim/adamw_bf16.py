"""AdamW for weights in bfloat16, whose updates are not lost to rounding.

A bfloat16 has eight significant bits: a weight of 1 moves by 1/128 upwards, or not at all. Updates of AdamW are about
as large as the learning rate, so at a rate of 1e-5 most of them round to nothing, and the model does not train. This
optimizer computes each update in float32 and keeps what the weight cannot hold, in one of two ways:

- "kahan" keeps the lower 16 bits of the float32 weight as an integer beside the upper 16, which are the weight, as a
  compensated sum does (Zamirai et al. 2020, arXiv 2010.06192; the split is that of Mellempudi et al. 2020, arXiv
  2005.04680). The sum is a float32 weight to the bit, in 2 + 2 bytes.
- "stochastic" rounds up with the probability of what is cut off (arXiv 2010.06192): right on average, and without
  further memory. Its random numbers depend on the seed, the step and the parameter alone. So a resumed run draws the
  same ones, replicas of a model draw alike, and nobody else's random numbers change.

Example, a weight of 1.0 and updates of 0.002, of which a bfloat16 takes none (the next one is 1.0078125):

    step   kahan: weight + rest        stochastic: one of many runs
    1      1.0      + 0.002            1.0
    2      1.0078125 - 0.0038125       1.0078125
    3      1.0078125 - 0.0018125       1.0078125

The mean of squared gradients is rounded stochastically where it is kept in bfloat16. Rounded to nearest, as other
optimizers do it, it would never fall with `adam_beta2=0.999`: a thousandth of it is less than half of its last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.distributed.device import get_kind, has_compiler
from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import Group
from trainwright.support.tensor_tree import local_part

logger = logging.getLogger(__name__)

Rounding = Literal["kahan", "stochastic"]
Factors: TypeAlias = tuple[float | Tensor, ...]
Update: TypeAlias = Callable[..., None]
# The lower 16 bits of a weight, in the state of its parameter: processes cannot exchange integers of 16 bits.
REST = ("rest_high", "rest_low")
HALF = 1 << 15
WHOLE = 1 << 16
PRIME = 1_000_003  # more than there are steps that matter, or parameters: each has other numbers
PIECE = 1 << 24  # numbers that are updated at once
KINDS = (torch.int8, torch.uint8)
MOMENTS: dict[object, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
}
KEPT_AS_THEY_ARE = (*REST, "exp_avg", "exp_avg_sq")  # torch would cast them to the type of the weight


class AdamWBF16(Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) whose weights may be bfloat16; weights in float32 are updated as they are.

    Bytes a weight in bfloat16, gradient included: 10 with "kahan", 8 with "stochastic", 4 more of both with
    `moments=torch.float32`, and 16 for float32 weights with torch's AdamW.

    Args:
        params: the parameters, or groups of them.
        lr: learning rate.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: of each step, times the learning rate.
        rounding: "kahan" or "stochastic".
        moments: type of both means for weights in bfloat16. With "kahan" and `torch.float32`, the weights and their
            rests are the weights that torch's AdamW computes in float32 from the same gradients.
        seed: of stochastic rounding.

    Raises:
        ArgumentError: a setting is out of range, or a parameter is neither in bfloat16 nor in float32 or float64.
    """

    keeps_small_updates = True  # read by `support.optimizer_facts`

    def __init__(
        self,
        params: Any,  # as torch's optimizers take them
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rounding: Rounding = "kahan",
        moments: torch.dtype | Literal["bfloat16", "float32"] = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        if rounding not in get_args(Rounding):
            raise ArgumentError(f"rounding={rounding!r}; choose of {', '.join(get_args(Rounding))}.")
        if moments not in MOMENTS:
            raise ArgumentError(f"moments={moments!r}; choose of bfloat16, float32.")
        if lr < 0 or not all(0 <= beta < 1 for beta in betas) or eps < 0 or weight_decay < 0:
            raise ArgumentError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: none may be negative, and betas are "
                "below 1."
            )
        self._rounding = rounding
        self.bf16_stochastic_round = rounding == "stochastic"  # torchao's name for it
        self._moments = MOMENTS[moments]
        self._seed = seed
        self._counted: list[Tensor] = []  # counts of the last step
        self._generators: dict[torch.device, torch.Generator] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group of parameters."""
        super().add_param_group(param_group)
        for one in self.param_groups[-1]["params"]:
            if one.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                del self.param_groups[-1]
                raise ArgumentError(
                    f"optim='adamw_bf16' updates weights in bfloat16 or float32, and a parameter of shape "
                    f"{tuple(one.shape)} is in {one.dtype}. Load the model with dtype=torch.bfloat16."
                )

    def __getstate__(self) -> Group:
        """Returns the settings too, which torch leaves out."""
        made = {"_rounding", "bf16_stochastic_round", "_moments", "_seed"}
        own = {name: value for name, value in vars(self).items() if name in made}
        return {**super().__getstate__(), **own, "_counted": [], "_generators": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(one.grad is not None and one.grad.is_sparse for one in self._parameters()):
            raise ArgumentError(
                "optim='adamw_bf16' takes dense gradients, and an embedding with sparse=True has others. Set "
                "sparse=False, or choose optim='sgd' or 'adagrad'."
            )
        self._counted = []
        # A scalar on the device that the guard sets, as for torch's fused optimizers; not zero: nothing changes.
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        factors: dict[tuple[int, torch.device, int], Factors] = {}
        number = 0
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                if not (state := self.state[parameter]):
                    self._begin(parameter, state)
                state["step"] += 1
                self._counted.append(state["step"])
                step = int(state["step"].item())  # in main memory
                key = index, parameter.device, step
                if key not in factors:
                    factors[key] = _factors(group, step, parameter.device)
                noise = self._noise(parameter.device, step, number) if parameter.dtype == torch.bfloat16 else None
                self._update(parameter, state, factors[key], noise, found_inf)
        return loss

    def take_back(self) -> None:
        """Uncounts the last step, which `found_inf` left out."""
        for step in self._counted:
            step.sub_(1)
        self._counted = []

    def _update(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        factors: Factors,
        noise: torch.Generator | None,
        found_inf: Tensor | None,
    ) -> None:
        assert parameter.grad is not None
        whole = [local_part(one) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        whole += [local_part(state[name]) for name in REST if name in state]
        # What is computed in float32 takes ten times the memory of a piece, and an embedding may be a tenth of a model.
        is_flat = all(one.is_contiguous() for one in whole)
        pieces = zip(*(torch.split(one.view(-1), PIECE) for one in whole), strict=True) if is_flat else (tuple(whole),)
        update = _fastest_update(parameter.device) if is_flat else _update_piece
        for weight, gradient, mean, square, *rest in pieces:
            # In this order: the chances of the means of squares, then those of the weights.
            for_square = _chances(square, noise) if square.dtype == torch.bfloat16 else None
            for_weight = _chances(weight, noise) if noise is not None and not rest else None
            update(weight, gradient, mean, square, rest, for_square, for_weight, factors, found_inf)

    def _begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        is_low = parameter.dtype == torch.bfloat16
        dtype = self._moments if is_low else parameter.dtype
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        if is_low and self._rounding == "kahan":
            state |= {name: torch.zeros_like(parameter, dtype=kind) for name, kind in zip(REST, KINDS, strict=True)}

    def _noise(self, device: torch.device, step: int, number: int) -> torch.Generator:
        """Returns the random numbers of a parameter in a step."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(((self._seed * PRIME + step) * PRIME + number) % (1 << 63))

    def load_state_dict(self, state_dict: Group) -> None:
        """Loads a state, each tensor in its own type."""
        super().load_state_dict(state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved, parameter in zip(ids, self._parameters(), strict=True):
            for name in KEPT_AS_THEY_ARE:
                value = state_dict["state"].get(saved, {}).get(name)
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
            if self.state[parameter]:
                self._convert(parameter, self.state[parameter])

    def _convert(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Gives a state of other settings the form of these: its means in their type, its rest or none."""
        if parameter.dtype != torch.bfloat16:
            return
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(self._moments)
        if self._rounding != "kahan":
            for name in REST:
                state.pop(name, None)
        elif REST[0] not in state:
            state |= {name: torch.zeros_like(parameter, dtype=kind) for name, kind in zip(REST, KINDS, strict=True)}

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


def _factors(group: Group, step: int, device: torch.device) -> Factors:
    """Returns the numbers of a step: as numbers on a CPU, as scalars on other devices, where a kernel reads them."""
    low, high = group["betas"]
    numbers = (
        1 - low,
        high,
        1 - high,
        1 - group["lr"] * group["weight_decay"],
        (1 - high**step) ** 0.5,
        group["eps"],
        -group["lr"] / (1 - low**step),
    )
    if device.type == "cpu":
        return numbers
    return tuple(torch.full((), value, dtype=torch.float32, device=device) for value in numbers)


def _update_piece(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rest: list[Tensor],
    for_square: Tensor | None,
    for_weight: Tensor | None,
    factors: Factors,
    found_inf: Tensor | None,
) -> None:
    """Updates tensors of one shape, element by element.

    Args:
        weight: in bfloat16, or in a wider type, in which all is computed then.
        gradient: of the loss.
        mean: of gradients.
        square: mean of squared gradients.
        rest: lower bits of the weights, or none.
        for_square: random numbers by which the mean of squares is rounded.
        for_weight: random numbers by which the weights are rounded.
        factors: what `_factors` returns.
        found_inf: nothing is changed where it is not zero.
    """
    share, kept, square_share, decay, correction, eps, rate = factors
    is_low = weight.dtype == torch.bfloat16
    wide_gradient = gradient.float() if is_low else gradient
    new_mean = mean.to(wide_gradient.dtype).lerp(wide_gradient, share)
    new_square = square.to(wide_gradient.dtype) * kept + wide_gradient * square_share * wide_gradient
    wide = (_join(weight, *rest) if is_low else weight) * decay
    wide = wide + new_mean * rate / (new_square.sqrt() / correction + eps)

    new = [wide]
    if rest:
        new = _split(wide)
    elif for_weight is not None:
        new = [_round_by_chance(wide, for_weight)]
    if for_square is not None:
        new_square = _round_by_chance(new_square, for_square)
    for old, value in zip((weight, *rest, mean, square), (*new, new_mean, new_square), strict=True):
        old.copy_(value if found_inf is None else torch.where(found_inf == 0, value.to(old.dtype), old))


@cache
def _fastest_update(device: torch.device) -> Update:
    """Returns `_update_piece`, compiled to one kernel where torch can do that; otherwise it takes some fifty."""
    if not (get_kind(device).runs_triton and has_compiler(device)):
        return _update_piece
    update: Update = torch.compile(_update_piece, dynamic=True)
    is_tried = False

    def try_compiled(*arguments: Any) -> None:
        nonlocal update, is_tried
        try:
            update(*arguments)
        except Exception as error:  # of the compiler, before anything was changed; it may lack a C compiler
            if is_tried or isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning(
                "optim='adamw_bf16' takes longer: torch.compile cannot make one kernel of its update (%s).",
                f"{type(error).__name__}: {error}".splitlines()[0],
            )
            update = _update_piece
            update(*arguments)
        is_tried = True

    return try_compiled


def _chances(like: Tensor, noise: torch.Generator | None) -> Tensor:
    return torch.randint(0, WHOLE, like.shape, dtype=torch.int32, device=like.device, generator=noise)


def _join(weight: Tensor, *rest: Tensor) -> Tensor:
    """Returns a weight in float32, with the bits that it lacks."""
    wide = weight.float()
    if not rest:
        return wide
    high, low = rest
    upper = wide.view(torch.int32)
    bits = upper + high.int() * 256 + low
    # A weight that somebody set to zero may have a rest from before, below zero, which would borrow from the sign.
    return torch.where((bits ^ upper) < 0, upper, bits).view(torch.float32)


def _split(wide: Tensor) -> list[Tensor]:
    """Returns the upper bits of a float32, rounded to nearest, and what is missing to it; a tie is rounded up.

    The rest of an infinite or NaN weight does not make it finite.
    """
    upper = wide.to(torch.bfloat16).float().view(torch.int32)
    missing = wide.view(torch.int32) - upper
    one_up = ((missing == HALF) & wide.isfinite()).int() * WHOLE  # a rest of 32,768 is one too much for 16 bits
    missing = (missing - one_up).clamp(-HALF, HALF - 1)
    return [(upper + one_up).view(torch.float32), missing >> 8, missing & 255]


def _round_by_chance(wide: Tensor, chances: Tensor) -> Tensor:
    """Returns float32 values with only the bits of a bfloat16: cut off, and up with the probability of what was cut."""
    rounded = ((wide.view(torch.int32) + chances) & -WHOLE).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide)
