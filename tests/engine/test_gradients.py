"""Clipping of whole and sharded gradients together: for those of one kind, the bits of torch's own function."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.engine.base import is_from
from trainwright.engine.gradients import clip_each_kind

Parameters = list[nn.Parameter]


def uniform() -> Parameters:
    return [nn.Parameter(torch.randn(n, 3)) for n in (4, 1, 7)]


def mixed() -> Parameters:
    return [*uniform(), nn.Parameter(torch.randn(5).to(torch.bfloat16)), nn.Parameter(torch.randn(2).double())]


def unused() -> Parameters:
    """Some without a gradient: frozen, or not in the loss."""
    parameters = uniform()
    parameters[0].requires_grad_(False)
    parameters.append(nn.Parameter(torch.randn(2)))
    return parameters


def scalar() -> Parameters:
    return [nn.Parameter(torch.tensor(2.0)), *uniform()]


def empty() -> Parameters:
    return [nn.Parameter(torch.empty(0, 3)), *uniform()]


MIXTURES: list[Callable[[], Parameters]] = [uniform, mixed, unused, scalar, empty]


def with_gradients(make: Callable[[], Parameters], scale: float) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    parameters = make()
    for i, p in enumerate(parameters):
        if p.requires_grad and not (make is unused and i == len(parameters) - 1):
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
    return parameters


@pytest.mark.parametrize("scale", [1e-4, 1e4, math.nan])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
@pytest.mark.parametrize("make", MIXTURES)
def test_the_same_bits_as_torch(make: Callable[[], Parameters], max_norm: float, scale: float) -> None:
    ours = with_gradients(make, scale)
    theirs = copy.deepcopy(ours)
    for one, other in zip(ours, theirs, strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    norm = clip_each_kind(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_no_gradients_at_all() -> None:
    assert clip_each_kind(uniform(), 1.0).item() == 0.0
    assert clip_each_kind([], 1.0).item() == 0.0


def test_a_wrapper_of_a_function_is_not_from_its_package() -> None:
    import functools
    from unittest.mock import MagicMock

    from accelerate import Accelerator

    @functools.wraps(torch.Tensor.backward)
    def wrapper(self: torch.Tensor) -> None: ...

    assert is_from(torch.Tensor.backward, "torch")
    assert is_from(Accelerator.backward, "accelerate")
    assert not is_from(Accelerator.backward, "torch")
    assert not is_from(wrapper, "torch")
    assert not is_from(MagicMock(), "torch")
    assert not is_from(functools.partial(torch.Tensor.backward), "torch")
