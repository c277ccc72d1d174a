"""What every engine must hold, whatever it wraps and wherever it computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainwright._types import Prepared
from trainwright.engine.base import Engine

from .engines import BACKENDS, Backend

FEATURES = 5
CLASSES = 3

engines = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> Iterator[None]:
    backend: Backend = request.getfixturevalue("backend")
    with backend.devices():
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES))


def batch(size: int, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, FEATURES, generator=generator) * scale, torch.arange(size) % CLASSES


def prepared(engine: Engine, model: nn.Module | None = None, *, lr: float = 0.1) -> Prepared:
    return engine.setup(
        engine.place(network() if model is None else model),
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=lr),
        make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    )


def counted_loss(model: Any, x: torch.Tensor, y: torch.Tensor, num_items: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="sum") / num_items


def window(engine: Engine, model: Any, parts: list[tuple[torch.Tensor, torch.Tensor]], num_items: int) -> None:
    for i, (x, y) in enumerate(parts):
        with engine.accumulate(model, sync=i == len(parts) - 1), engine.mixed_precision(model):
            loss = counted_loss(model, x, y, num_items)
        engine.backward(loss)


def weights(engine: Engine, model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.unwrap(model).parameters()]


@engines
def test_accumulating_four_times_two_equals_one_batch_of_eight(backend: Backend) -> None:
    x, y = batch(8)
    ends = []
    for size in (2, 8):
        engine = backend.make()
        made = prepared(engine)
        parts = [(x[i : i + size], y[i : i + size]) for i in range(0, 8, size)]
        window(engine, made.model, parts, num_items=8)
        norm = engine.clip(made.model, 1.0)
        assert engine.step(made.optimizer)
        ends.append((norm, weights(engine, made.model)))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@engines
def test_the_factories_are_called_in_order_with_what_they_need(backend: Backend) -> None:
    engine = backend.make()
    model = network()
    calls = []

    def make_optimizer(m: nn.Module) -> Any:
        calls.append(("optimizer", sum(p.numel() for p in m.parameters())))
        return torch.optim.SGD(m.parameters(), lr=0.1)

    def make_scheduler(optimizer: Any) -> Any:
        calls.append(("scheduler", optimizer.param_groups[0]["lr"]))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    size = sum(p.numel() for p in model.parameters())
    made = engine.setup(engine.place(model), make_optimizer=make_optimizer, make_scheduler=make_scheduler)
    assert calls == [("optimizer", size), ("scheduler", 0.1)]
    assert engine.unwrap(made.model) is model
    assert engine.unwrap(model) is model


@engines
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clipping_is_torchs_to_the_bit(backend: Backend, max_norm: float) -> None:
    engine = backend.make()
    made = prepared(engine)
    twin = copy.deepcopy(engine.unwrap(made.model))
    x, y = batch(6, scale=3.0)
    window(engine, made.model, [(x, y)], num_items=6)
    counted_loss(twin, x, y, 6).backward()
    if not backend.is_exact:  # gradients of parts of the batch are added up: only how they are clipped is the same
        for other, one in zip(twin.parameters(), engine.unwrap(made.model).parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
            other.grad = one.grad.clone()
    norm = engine.clip(made.model, max_norm)
    assert torch.equal(norm.cpu(), torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
    for one, other in zip(engine.unwrap(made.model).parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad.cpu(), other.grad)


@engines
def test_measuring_changes_nothing(backend: Backend) -> None:
    engine = backend.make()
    made = prepared(engine)
    window(engine, made.model, [batch(4)], num_items=4)
    before = [p.grad.clone() for p in made.model.parameters()]
    norm = engine.measure_norm(made.model)
    assert all(torch.equal(p.grad, g) for p, g in zip(made.model.parameters(), before, strict=True))
    assert norm > 0
    assert norm.ndim == 0
    assert torch.equal(norm, engine.clip(made.model, math.inf))


@engines
def test_zero_grad_leaves_nothing_to_add_to(backend: Backend) -> None:
    engine = backend.make()
    made = prepared(engine)
    window(engine, made.model, [batch(4)], num_items=4)
    engine.zero_grad(made.model)
    assert all(p.grad is None or not p.grad.any() for p in made.model.parameters())
    assert engine.clip(made.model, 1.0).item() == 0.0


@engines
def test_frozen_and_unused_parameters_are_left_alone(backend: Backend) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = network()
            self.unused = nn.Linear(2, 2)
            self.used[0].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    engine = backend.make()
    made = prepared(engine, Partly())
    model = engine.unwrap(made.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    window(engine, made.model, [batch(4)], num_items=4)
    engine.clip(made.model, 1.0)
    engine.step(made.optimizer)
    changed = {
        name.split(".")[0] + name.split(".")[1]
        for name, p in model.named_parameters()
        if not torch.equal(p, before[name])
    }
    assert changed == {"used1", "used3"}


@engines
def test_a_parameter_that_was_added_is_clipped_and_cleared_at_once(backend: Backend) -> None:
    engine = backend.make()
    made = prepared(engine)
    made.model.extra = nn.Parameter(torch.ones(3))
    made.model.extra.grad = torch.full((3,), 100.0)
    assert engine.clip(made.model, 1.0).item() == pytest.approx(100.0 * math.sqrt(3))
    assert made.model.extra.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
    engine.zero_grad(made.model)
    assert made.model.extra.grad is None


# -- mixed precision -------------------------------------------------------------------------------------------------


def types_within(engine: Engine, model: nn.Module) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    hook = engine.unwrap(model)[0].register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    with engine.mixed_precision(model):
        out = model(batch(2)[0])
    hook.remove()
    return [*dict.fromkeys(seen), out.dtype]  # of several copies one each


@engines
@pytest.mark.parametrize(("mixed", "inner"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_runs_in_the_type_that_was_asked_for(backend: Backend, mixed: str, inner: torch.dtype) -> None:
    engine = backend.make(mixed)
    model = prepared(engine).model
    assert types_within(engine, model) == [inner, torch.float32]
    assert all(p.dtype == torch.float32 for p in model.parameters())


@engines
@pytest.mark.parametrize("mixed", ["bf16", "fp16"])
def test_mixed_precision_ends_where_it_ends(backend: Backend, mixed: str) -> None:
    """Also when it is entered twice, as an override of compute_loss does, and after an error."""
    engine = backend.make(mixed)
    model = prepared(engine).model
    x, _ = batch(2)
    plain = model(x)
    with engine.mixed_precision(model), engine.mixed_precision(model):
        model(x)
    with pytest.raises(ZeroDivisionError), engine.mixed_precision(model):
        1 / 0  # noqa: B018
    assert torch.equal(model(x), plain)
    assert not torch.is_autocast_enabled(engine.device.type)


@engines
@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
def test_it_learns(backend: Backend, mixed: str) -> None:
    engine = backend.make(mixed)
    made = prepared(engine, lr=0.05)
    x, y = batch(12)
    losses = []
    for _ in range(40):
        with engine.mixed_precision(made.model):
            loss = counted_loss(made.model, x, y, 12)
        engine.backward(loss)
        engine.clip(made.model, 1.0)
        engine.step(made.optimizer)
        engine.zero_grad(made.model)
        losses.append(loss.item())
    assert losses[-1] < 0.3 < losses[0]


@engines
def test_an_overflow_in_fp16_skips_the_update_and_says_so(backend: Backend) -> None:
    engine = backend.make("fp16")
    made = prepared(engine)
    before = weights(engine, made.model)
    x, y = batch(4)
    with engine.mixed_precision(made.model):
        loss = counted_loss(made.model, x, y, 4) * 1e6
    engine.backward(loss)
    engine.clip(made.model, 1.0)
    assert engine.step(made.optimizer) is False
    assert all(torch.equal(a, b) for a, b in zip(weights(engine, made.model), before, strict=True))
    engine.zero_grad(made.model)
    applied = False
    for _ in range(30):  # the scale comes down until the gradients fit
        with engine.mixed_precision(made.model):
            loss = counted_loss(made.model, x, y, 4)
        engine.backward(loss)
        norm = engine.clip(made.model, 1.0)
        applied = engine.step(made.optimizer)
        engine.zero_grad(made.model)
        if applied:
            break
    assert applied
    assert torch.isfinite(norm)
    assert not all(torch.equal(a, b) for a, b in zip(weights(engine, made.model), before, strict=True))


# -- small promises --------------------------------------------------------------------------------------------------


@engines
def test_one_process_gathers_what_it_has(backend: Backend) -> None:
    engine = backend.make()
    value = {"a": torch.ones(2), "b": [torch.zeros(1)]}
    assert engine.gather(value) is value
    assert engine.num_processes == 1
    engine.barrier()


@engines
def test_the_accelerator_is_accelerates(backend: Backend) -> None:
    from accelerate import Accelerator

    engine = backend.make("bf16")
    assert isinstance(engine.accelerator, Accelerator)
    assert engine.accelerator.mixed_precision == "bf16"
    assert engine.accelerator.device.type == engine.device.type
