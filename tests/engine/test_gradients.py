"""Clipping and clearing: the bits of torch's own, for any mixture of gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.engine.base import PlainBackward
from trainwright.engine.gradients import FusedAdam, Gradients

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


@pytest.mark.parametrize("size", [0.0, 1e-30, 0.3, 0.999999, 1.0, 1.000001, 7.0, 1e19, math.inf, math.nan])
def test_the_scale_has_the_bits_of_torch_for_any_norm(size: float) -> None:
    for max_norm in (1.0, 0.1, 3.7):
        (ours,), (theirs,) = single(), single()
        values = torch.rand(9) * size
        ours.grad, theirs.grad = values.clone(), values.clone()
        norms = Gradients([ours]).clip(max_norm), nn.utils.clip_grad_norm_([theirs], max_norm)
        assert norms[0].view(torch.int32).item() == norms[1].view(torch.int32).item()
        assert torch.equal(ours.grad.view(torch.int32), theirs.grad.view(torch.int32))


# -- updates ---------------------------------------------------------------------------------------------------------


def pair(cls: type[torch.optim.Adam] = torch.optim.AdamW, **settings: object) -> list[torch.optim.Optimizer]:
    torch.manual_seed(3)
    first = uniform()
    twins = [first, copy.deepcopy(first)]
    return [
        cls([{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.2}], lr=0.1, fused=True, **settings) for p in twins
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> Parameters:
    return [p for group in optimizer.param_groups for p in group["params"]]


def values_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = parameters_of(optimizer)
    return [*(p.detach() for p in parameters), *(v for p in parameters for v in optimizer.state[p].values())]


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_an_update_has_the_bits_of_torch(cls: type[torch.optim.Adam]) -> None:
    ours, theirs = pair(cls)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0)
    fused, made = FusedAdam.of(ours), []
    assert fused is not None
    for step in range(8):
        for mine, yours in zip(parameters_of(ours), parameters_of(theirs), strict=True):
            mine.grad = None if step == 5 and mine.ndim == 2 and len(mine) == 1 else torch.randn_like(mine)
            yours.grad = mine.grad
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.found_inf = torch.tensor(1.0) if step == 6 else None
        made.append(fused.step(ours))
        if not made[-1]:
            ours.step()
        theirs.step()
        schedule.step()
        for one, other in zip(values_of(ours), values_of(theirs), strict=True):
            assert torch.equal(one, other)
    assert made == [False] + [True] * 7  # the first one makes the states


def test_an_update_that_somebody_listens_to_is_left_to_the_optimizer() -> None:
    ours, _ = pair()
    for p in parameters_of(ours):
        p.grad = torch.ones_like(p)
    fused = FusedAdam.of(ours)
    assert fused is not None
    ours.step()
    assert fused.step(ours)
    handle = ours.register_step_post_hook(lambda *_: None)
    assert not fused.step(ours)
    handle.remove()
    with torch.autograd.profiler.profile():
        assert not fused.step(ours)
    assert fused.step(ours)
    ours.load_state_dict(ours.state_dict())
    assert not fused.step(ours)  # its groups are others
    ours.step = lambda: None  # type: ignore[method-assign]
    assert FusedAdam.of(ours) is None


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, fused=False),
        lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
        lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(2).double())], fused=True),
        lambda p: torch.optim.SGD(p, fused=True),
        lambda p: type("Own", (torch.optim.AdamW,), {})(p, fused=True),
    ],
)
def test_other_optimizers_are_left_alone(optimizer: Callable[[Parameters], torch.optim.Optimizer]) -> None:
    assert FusedAdam.of(optimizer(uniform())) is None


# -- the backward pass -----------------------------------------------------------------------------------------------


def test_a_backward_pass_survives_a_function_that_writes_to_its_gradient() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.mul_(3.0)

    backward, found = PlainBackward(), []
    for dtype in (torch.float32, torch.float32, torch.float64):
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        backward(Writes.apply(weight * 2.0))
        assert weight.grad is not None
        found.append(weight.grad.item())
    assert found == [6.0, 6.0, 6.0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(()))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        backward(torch.ones(2, requires_grad=True) * 2)
