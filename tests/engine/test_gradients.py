"""Clipping and clearing: the bits of torch's own, for any mixture of gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.engine.gradients import Gradients

Parameters = list[nn.Parameter]


def uniform() -> Parameters:
    return [nn.Parameter(torch.randn(n, 3)) for n in (4, 1, 7)]


def mixed() -> Parameters:
    return [*uniform(), nn.Parameter(torch.randn(5).to(torch.bfloat16)), nn.Parameter(torch.randn(2).double())]


def half() -> Parameters:
    return [nn.Parameter(torch.randn(4, 4).to(torch.bfloat16)) for _ in range(3)]


def unused() -> Parameters:
    """Some without a gradient: frozen, or not in the loss."""
    parameters = uniform()
    parameters[0].requires_grad_(False)
    parameters.append(nn.Parameter(torch.randn(2)))
    return parameters


def single() -> Parameters:
    return [nn.Parameter(torch.randn(9))]


def scalar() -> Parameters:
    return [nn.Parameter(torch.tensor(2.0)), *uniform()]


def empty() -> Parameters:
    return [nn.Parameter(torch.empty(0, 3)), *uniform()]


MIXTURES: list[Callable[[], Parameters]] = [uniform, mixed, half, unused, single, scalar, empty]


def with_gradients(make: Callable[[], Parameters], scale: float) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    parameters = make()
    for i, p in enumerate(parameters):
        if p.requires_grad and not (make is unused and i == len(parameters) - 1):
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
    return parameters


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
@pytest.mark.parametrize("make", MIXTURES)
def test_the_same_bits_as_torch(make: Callable[[], Parameters], max_norm: float, scale: float) -> None:
    ours = with_gradients(make, scale)
    theirs = copy.deepcopy(ours)
    for one, other in zip(ours, theirs, strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    norm = Gradients(ours).clip(max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("make", MIXTURES)
def test_infinity_only_measures(make: Callable[[], Parameters]) -> None:
    parameters = with_gradients(make, 3.0)
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    norm = Gradients(parameters).clip(math.inf)
    squares = sum((g.double() ** 2).sum() for g in before if g is not None)
    assert norm.item() == pytest.approx(math.sqrt(squares), rel=1e-2)
    assert all(p.grad is g or torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(bad: float) -> None:
    ours, theirs = with_gradients(uniform, 1.0), with_gradients(uniform, 1.0)
    for parameters in (ours, theirs):
        parameters[1].grad[0, 0] = bad
    norm, expected = Gradients(ours).clip(1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(norm.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.grad.nan_to_num(-1.0), other.grad.nan_to_num(-1.0))


def test_no_gradients_at_all() -> None:
    gradients = Gradients(uniform())
    assert gradients.clip(1.0).item() == 0.0
    assert Gradients([]).clip(1.0).item() == 0.0


def test_clearing_leaves_none() -> None:
    parameters = with_gradients(mixed, 1.0)
    Gradients(parameters).clear()
    assert [p.grad for p in parameters] == [None] * len(parameters)
