"""The running loss: exact in fp32, and what becomes of a loss that is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.state.meter import COMPACT_AFTER, LossMeter

from .._support.small import OURS, REFERENCE, Side, data, make_trainer, models

NAN = float("nan")
INF = float("inf")


def fill(meter: LossMeter, steps: list[list[float]]) -> LossMeter:
    for losses in steps:
        for loss in losses:
            meter.add(torch.tensor(loss))
        meter.end_step()
    return meter


def sequential(values: list[float]) -> float:
    total = torch.tensor(0.0)
    for value in values:
        total += torch.tensor(value)
    return total.item()


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=40))
def test_the_total_is_the_sequential_sum_in_fp32(values: list[float]) -> None:
    reading = fill(LossMeter("cpu"), [[v] for v in values]).drain()
    assert reading.total == sequential(values)
    assert reading.num_non_finite == 0


@pytest.mark.parametrize("count", [COMPACT_AFTER - 1, COMPACT_AFTER, COMPACT_AFTER + 1, 3 * COMPACT_AFTER + 5])
@pytest.mark.parametrize("bad_at", [None, 0, 700, -1])
def test_many_losses_are_packed_without_a_difference(count: int, bad_at: int | None) -> None:
    values = [0.001 * (i % 17) for i in range(count)]
    meter = LossMeter("cpu")
    if bad_at is not None:
        values[bad_at] = NAN
    fill(meter, [[v] for v in values])
    assert len(meter._losses) < COMPACT_AFTER
    assert meter.count == count
    reading = meter.drain()
    assert reading.num_non_finite == (bad_at is not None)
    finite = [v for v in values if math.isfinite(v)]
    assert reading.total == pytest.approx(sequential(finite), rel=1e-3)


def test_packing_does_not_move_the_replacement() -> None:
    """What is worked out from packed losses is what is worked out from loose ones."""
    values = [1.0, 2.0, 4.0] * 500
    values[1200] = NAN
    one = fill(LossMeter("cpu"), [[v] for v in values]).drain()
    total = torch.tensor(0.0)
    for step, value in enumerate(values):
        total += torch.tensor(value) if math.isfinite(value) else total / (1 + step)
    assert one.total == total.item()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_loss_that_is_not_finite_counts_as_mean_of_the_steps_before(bad: float) -> None:
    reading = fill(LossMeter("cpu"), [[3.0], [5.0], [bad], [1.0]]).drain()
    assert reading.total == pytest.approx(3.0 + 5.0 + 8.0 / 3 + 1.0, rel=1e-6)
    assert reading.num_non_finite == 1


def test_infinities_of_both_signs_are_both_counted() -> None:
    assert fill(LossMeter("cpu"), [[INF], [-INF], [1.0]]).drain().num_non_finite == 2


def test_unfiltered_it_is_returned_unchanged() -> None:
    reading = fill(LossMeter("cpu", skip_non_finite=False), [[3.0], [NAN], [INF]]).drain()
    assert math.isnan(reading.total)
    assert reading.num_non_finite == 2


def test_draining_starts_anew() -> None:
    meter = fill(LossMeter("cpu"), [[1.0], [NAN], [2.0]])
    meter.drain()
    assert meter.total.item() == 0.0
    reading = fill(meter, [[4.0], [NAN]]).drain()
    assert reading.total == 4.0 + 4.0 / 2
    assert reading.num_non_finite == 1
    assert meter.count == 0


def test_a_sum_that_overflows_is_no_loss_that_is_not_finite() -> None:
    reading = fill(LossMeter("cpu"), [[3e38], [3e38]]).drain()
    assert reading.num_non_finite == 0
    assert reading.total == INF


def test_losses_of_another_type() -> None:
    meter = LossMeter("cpu")
    for value in (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([2.0]).sum(), torch.tensor(NAN).half()):
        meter.add(value)
        meter.end_step()
    reading = meter.drain()
    assert reading.total == pytest.approx(3.5 + 3.5 / 3, rel=1e-6)
    assert reading.num_non_finite == 1


# -- against transformers --------------------------------------------------------------------------------------------


class Stumbles(models.ReturnsDict):
    """Gives NaN or infinity as loss at some micro-batches, without harm to the weights."""

    at: dict[int, float] = {}  # noqa: RUF012
    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        out = super().forward(x, labels)
        bad = self.at.get(self.calls)
        self.calls += 1
        if bad is None:
            return out
        return {**out, "loss": out["loss"] * 0 + _constant(bad, out["loss"])}


class _Constant(torch.autograd.Function):
    """A value with a gradient of zero, which a NaN times zero has not."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(like, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.zeros_like(grad), None


def _constant(value: float, like: torch.Tensor) -> Any:
    return _Constant.apply(like, value)


def losses(side: Side, folder: Path, at: dict[int, float], **settings: Any) -> list[float]:
    model = models.seeded(Stumbles)
    model.at = at
    if side is OURS:  # its gradients are finite, so the original trains on
        settings["on_nonfinite"] = "ignore"
    trainer = make_trainer(folder, side, model=model, train_dataset=data.vectors(26), **settings)
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "train_loss") if name in entry]


@pytest.mark.framework
@pytest.mark.parametrize("at", [{4: NAN}, {0: NAN}, {3: INF, 5: -INF}, {2: NAN, 3: NAN, 9: INF}], ids=str)
@pytest.mark.parametrize("logging_steps", [1, 3, 5])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.one_in(5)
def test_logged_as_transformers_logs(
    at: dict[int, float], logging_steps: int, accumulation: int, tmp_path: Path
) -> None:
    settings = {"logging_steps": logging_steps, "gradient_accumulation_steps": accumulation}
    theirs = losses(REFERENCE, tmp_path, at, **settings)
    assert losses(OURS, tmp_path, at, **settings) == theirs
    assert all(map(math.isfinite, theirs))


@pytest.mark.framework
def test_unfiltered_only_the_log_with_the_bad_loss_is_not_finite(tmp_path: Path) -> None:
    """The original subtracts the sum from itself, so that all later logs are NaN too."""
    settings = {"logging_nan_inf_filter": False, "logging_steps": 2}
    ours, theirs = (losses(side, tmp_path, {4: NAN}, **settings) for side in (OURS, REFERENCE))
    healthy = losses(OURS, tmp_path, {}, **settings)
    assert [math.isnan(x) for x in ours] == [False, False, True, False, False, False, False, True]
    assert ours[:2] == theirs[:2] == healthy[:2]


def test_how_many_were_not_finite_is_logged(tmp_path: Path) -> None:
    model = models.seeded(Stumbles)
    model.at = {2: NAN, 3: INF, 9: NAN}
    trainer = make_trainer(tmp_path, model=model, logging_steps=4, incidents=False)  # which would call the model
    trainer.train()
    counts = {e["step"]: e.get("num_non_finite_losses", 0) for e in trainer.state.log_history if "loss" in e}
    assert counts == {4: 2, 8: 0, 12: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_sum_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    losses = (torch.randn(400, generator=torch.Generator().manual_seed(1)) * 10.0 ** (torch.arange(400) % 9)).to(dtype)
    meter = LossMeter("cpu")
    total = torch.tensor(0.0)
    for number, loss in enumerate([*losses, torch.tensor(math.nan)]):
        if number == 200:
            meter.total = meter.total.clone()  # as an override of the log hook may
        meter.add(loss)
        total += loss
        assert meter.total.item() == total.item() or math.isnan(total.item())
    assert math.isnan(meter.total.item())


def test_the_loss_of_a_step_is_known_where_each_loss_is_read() -> None:
    meter = LossMeter("cpu")
    for value in (1.0, 2.5):
        meter.add(torch.tensor(value))
    assert meter.read_step_loss() == meter.sum_step().item() == 3.5
    meter.rewind(0)
    assert meter.read_step_loss() == 0.0
    meter.add(torch.tensor(1.0, dtype=torch.float64))
    assert meter.read_step_loss() == 1.0
    meter.end_step()
    assert meter.read_step_loss() == 0.0


def test_the_loss_of_step_of_more_micro_batches_than_are_kept_apart() -> None:
    meter = LossMeter("cpu")
    for _ in range(COMPACT_AFTER + 3):
        meter.add(torch.tensor(1.0))
        meter.end_step()
    for _ in range(COMPACT_AFTER + 5):
        meter.add(torch.tensor(0.5))
    assert meter.read_step_loss() == meter.sum_step().item() == (COMPACT_AFTER + 5) / 2
    assert meter.count == 2 * COMPACT_AFTER + 8


def test_loss_whose_memory_has_the_other_sign_is_added_as_it_reads() -> None:
    """`z.conj().imag` is a view of the memory of `z.imag` with the negative bit."""
    loss = torch.tensor(1.0 + 2.0j).conj().imag
    assert loss.is_neg()
    meter = LossMeter("cpu")
    meter.add(loss)
    assert meter.read_step_loss() == meter.drain().total == -2.0
