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

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import Group
from trainwright.support.tensor_tree import local_part

Rounding = Literal["kahan", "stochastic"]
# The lower 16 bits of a weight, in the state of its parameter: processes cannot exchange integers of 16 bits.
REST = ("rest_high", "rest_low")
HALF = 1 << 15
WHOLE = 1 << 16
PRIME = 1_000_003  # more than there are steps that matter, or parameters: each has other numbers
PIECE = 1 << 24  # numbers that are updated at once
KINDS = (torch.int8, torch.uint8)
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
        ArgumentError: a parameter is neither in bfloat16 nor in float32 or float64.
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
        self._rounding = rounding
        self.bf16_stochastic_round = rounding == "stochastic"  # torchao's name for it
        self._moments: torch.dtype = getattr(torch, moments) if isinstance(moments, str) else moments
        self._seed = seed
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group of parameters."""
        super().add_param_group(param_group)
        for one in self.param_groups[-1]["params"]:
            if one.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                raise ArgumentError(
                    f"optim='adamw_bf16' updates weights in bfloat16 or float32, and a parameter of shape "
                    f"{tuple(one.shape)} is in {one.dtype}. Load the model with dtype=torch.bfloat16."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, group, number)
        return loss

    def _update(self, parameter: Tensor, group: Group, number: int) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        step = int(state["step"].item())  # in main memory
        is_low = parameter.dtype == torch.bfloat16
        noise = self._noise(parameter.device, step, number) if is_low else None
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ArgumentError(
                "optim='adamw_bf16' takes dense gradients, and an embedding with sparse=True has others. Set "
                "sparse=False, or choose optim='sgd' or 'adagrad'."
            )
        whole = [local_part(one) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        whole += [local_part(state[name]) for name in REST if name in state]
        # What is computed in float32 takes ten times the memory of a piece, and an embedding may be a tenth of a model.
        is_flat = all(one.is_contiguous() for one in whole)
        pieces = zip(*(torch.split(one.view(-1), PIECE) for one in whole), strict=True) if is_flat else (tuple(whole),)
        for weight, gradient, mean, square, *rest in pieces:
            wide_gradient = gradient.float() if is_low else gradient
            mean.copy_(new_mean := mean.to(wide_gradient.dtype).lerp_(wide_gradient, 1 - group["betas"][0]))
            new_square = square.to(wide_gradient.dtype).mul_(group["betas"][1])
            new_square.addcmul_(wide_gradient, wide_gradient, value=1 - group["betas"][1])
            square.copy_(_round_by_chance(new_square, noise) if square.dtype == torch.bfloat16 else new_square)

            wide = _join(weight, *rest) if is_low else weight
            wide.mul_(1 - group["lr"] * group["weight_decay"])
            root = new_square.sqrt().div_((1 - group["betas"][1] ** step) ** 0.5).add_(group["eps"])
            wide.addcdiv_(new_mean, root, value=-group["lr"] / (1 - group["betas"][0] ** step))
            if rest:
                _split(wide, weight, *rest)
            elif is_low:
                weight.copy_(_round_by_chance(wide, noise))

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
        generator = torch.Generator(device)
        generator.manual_seed(((self._seed * PRIME + step) * PRIME + number) % (1 << 63))
        return generator

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


def _split(wide: Tensor, weight: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes the upper bits of a float32, rounded to nearest, and what is missing to it; a tie is rounded up.

    The rest of an infinite or NaN weight does not make it finite.
    """
    upper = wide.to(torch.bfloat16)
    missing = wide.view(torch.int32) - upper.float().view(torch.int32)
    one_up = ((missing == HALF) & wide.isfinite()).int() * WHOLE  # a rest of 32,768 is one too much for 16 bits
    weight.copy_((upper.float().view(torch.int32) + one_up).view(torch.float32))
    missing = (missing - one_up).clamp_(-HALF, HALF - 1)
    high.copy_(missing >> 8)
    low.copy_(missing & 255)


def _round_by_chance(wide: Tensor, noise: torch.Generator | None) -> Tensor:
    """Returns float32 values with only the bits of a bfloat16: cut off, and up with the probability of what was cut."""
    bits = wide.view(torch.int32)
    chance = torch.randint(0, WHOLE, wide.shape, dtype=torch.int32, device=wide.device, generator=noise)
    rounded = ((bits + chance) & -WHOLE).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide)
