"""AdamW on weights in bfloat16: float32 weights to the bit, or right on average; and what a small rate trains."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import ArgumentError
from trainwright.optim import adamw_bf16
from trainwright.optim.adamw_bf16 import REST, AdamWBF16

from .._support.small import StopAt
from .._support.two_processes import run
from ..parity.sides import differing, weights
from .table import Net, Row, losses, make_trainer

NUM_STEPS = 60
ROUNDINGS = ("kahan", "stochastic")
SMALL_RATE = 2e-5


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def every_kind_of_float() -> torch.Tensor:
    """Random bits, every tie between two values of bfloat16, and the ends of the range."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    ties = (torch.arange(1 << 16) * (1 << 16) + (1 << 15)).to(torch.int32)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45])
    return torch.cat([random.view(torch.float32), ties.view(torch.float32), ends])


def test_a_weight_and_its_rest_are_the_float32_to_the_bit() -> None:
    wide = every_kind_of_float()
    upper, *lower = adamw_bf16._split(wide)
    weight = upper.bfloat16()
    rest = [one.to(kind) for one, kind in zip(lower, adamw_bf16.KINDS, strict=True)]
    is_nan = wide.isnan()
    assert torch.equal(bits(adamw_bf16._join(weight, *rest))[~is_nan], bits(wide)[~is_nan])
    assert adamw_bf16._join(weight, *rest)[is_nan].isnan().all()
    assert weight[is_nan].isnan().all()


@pytest.mark.parametrize("piece", [adamw_bf16.PIECE, 7])
def test_with_float32_moments_it_is_the_adamw_of_float32_weights(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_bf16, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    low = nn.Parameter(torch.randn(5, 8, generator=generator).bfloat16())
    high = nn.Parameter(low.detach().float())
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    ours = AdamWBF16([low], moments=torch.float32, **settings)
    theirs = torch.optim.AdamW([high], foreach=False, **settings)
    for _ in range(NUM_STEPS):
        low.grad = torch.randn(low.shape, generator=generator).bfloat16()
        high.grad = low.grad.float()
        ours.step()
        theirs.step()
    rest = [ours.state[low][name] for name in REST]
    assert torch.equal(adamw_bf16._join(low.detach(), *rest), high.detach())


def test_by_chance_values_are_right_on_average_within_one_bit() -> None:
    value = torch.full((100_000,), 1 + 0.3 / 128)  # three tenths of the way between two values of bfloat16
    noise = torch.Generator().manual_seed(1)
    rounded = adamw_bf16._round_by_chance(value, adamw_bf16._chances(value, noise))
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(value[0].item(), abs=5e-5)
    ends = every_kind_of_float()
    after = adamw_bf16._round_by_chance(ends, adamw_bf16._chances(ends, noise))
    assert torch.equal(after.isnan(), ends.isnan())
    assert torch.equal(after[ends.isinf()], ends[ends.isinf()])
    assert not (bits(after) & 0xFFFF)[ends.isfinite()].any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_mean_of_squares_falls_again(rounding: Any) -> None:
    """Rounded to nearest it would keep the largest value for ever: 0.999 of it is the same bfloat16."""
    one = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AdamWBF16([one], lr=0.0, rounding=rounding)
    for step in range(1500):
        one.grad = torch.full_like(one, 1.0 if step == 0 else 0.0)
        optimizer.step()
    mean = optimizer.state[one]["exp_avg_sq"].float().mean().item()
    assert mean == pytest.approx(0.001 * 0.999**1499, rel=0.1)


def test_nobody_elses_random_numbers_change() -> None:
    one = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    one.grad = torch.ones_like(one)
    before = torch.get_rng_state()
    AdamWBF16([one], rounding="stochastic").step()
    assert torch.equal(torch.get_rng_state(), before)


def test_two_seeds_round_otherwise_and_one_alike() -> None:
    def updated(seed: int) -> torch.Tensor:
        one = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
        one.grad = torch.ones_like(one)
        AdamWBF16([one], lr=1e-3, rounding="stochastic", seed=seed).step()
        return one.detach()

    assert torch.equal(updated(1), updated(1))
    assert not torch.equal(updated(1), updated(2))


def test_other_types_of_weights_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"float16.*dtype=torch\.bfloat16"):
        AdamWBF16([nn.Parameter(torch.ones(3, dtype=torch.float16))])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0])
def test_weights_that_somebody_sets_stay_finite(value: float) -> None:
    """Zero has no bits from which a rest below zero could be taken."""
    one = nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = AdamWBF16([one], lr=1e-3)
    for _ in range(2):
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        optimizer.step()
        one.data.fill_(value)
    one.grad = torch.zeros_like(one)
    optimizer.step()
    assert (one.detach().float() - value).abs().max() < 0.02


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_one_compilation_serves_all_shapes_steps_and_rates(rounding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the numbers of a step are scalars on the device; each kind of state has one more."""
    num_compiled = 0

    def count(graph: Any, examples: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(adamw_bf16._update_piece, dynamic=True, fullgraph=True, backend=count)
    on_device = torch.tensor(0.0), torch.tensor(1.0)
    numbers = adamw_bf16._factors
    monkeypatch.setattr(adamw_bf16, "_factors", lambda *of: tuple(map(torch.tensor, numbers(*of))))
    kept = []
    for update in (adamw_bf16._update_piece, compiled):
        monkeypatch.setattr(adamw_bf16, "_fastest_update", lambda device, update=update: update)
        generator = torch.Generator().manual_seed(0)
        ones = [nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in ((3, 5), (64,), (200, 7))]
        optimizer = AdamWBF16(ones, rounding=rounding)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.found_inf = on_device[step == 2]  # type: ignore[attr-defined]
            for one in ones:
                one.grad = torch.randn(one.shape, generator=generator).bfloat16()
            before = [one.detach().clone() for one in ones]
            optimizer.step()
            assert all(map(torch.equal, before, ones)) is (step == 2)
            if step == 2:
                optimizer.take_back()
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}
        kept.append([one.detach() for one in ones])
    assert all(map(torch.equal, *kept))
    assert num_compiled <= 2


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_loaded_state_takes_the_form_of_the_settings(rounding: Any, moments: torch.dtype) -> None:
    states = []
    for other in ROUNDINGS:
        one = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        one.grad = torch.ones_like(one)
        before = AdamWBF16([one], rounding=other, moments=torch.float32)
        before.step()
        after = AdamWBF16([one], rounding=rounding, moments=moments)
        after.load_state_dict(before.state_dict())
        after.step()
        states.append({name: value.dtype for name, value in after.state[one].items()})
    kinds = dict(zip(REST, adamw_bf16.KINDS, strict=True)) if rounding == "kahan" else {}
    assert states == [{"step": torch.float32, "exp_avg": moments, "exp_avg_sq": moments, **kinds}] * 2


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    first = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first.grad = torch.ones_like(first)
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    optimizer = AdamWBF16([first, *table.parameters()], lr=0.1)
    with pytest.raises(ArgumentError, match="dense gradients"):
        optimizer.step()
    assert not optimizer.state
    assert first.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "setting", [{"rounding": "nearest"}, {"moments": "float8"}, {"lr": -1.0}, {"betas": (0.9, 1.0)}], ids=str
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(setting))):
        AdamWBF16([nn.Parameter(torch.ones(2))], **setting)


def test_a_group_that_is_refused_is_not_kept() -> None:
    optimizer = AdamWBF16([nn.Parameter(torch.ones(2))])
    with pytest.raises(ArgumentError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_copy_goes_on_alike(rounding: Any, copied: Any) -> None:
    optimizer = AdamWBF16(
        [nn.Parameter(torch.ones(64, dtype=torch.bfloat16))], rounding=rounding, moments="float32", seed=3
    )
    both = [optimizer]
    for step in range(4):
        for one in both:
            (weight,) = one.param_groups[0]["params"]
            weight.grad = torch.full_like(weight, 0.1 * (step + 1))
            one.step()
        if step == 1:
            both.append(copied(optimizer))
    first, second = (one.param_groups[0]["params"][0] for one in both)
    assert first is not second
    assert torch.equal(first, second)


# -- through the trainer -----------------------------------------------------------------------------------------------


def loss_after(folder: Path, optim: str, dtype: torch.dtype, options: str | None = None) -> tuple[float, float]:
    """The loss before and after training at a small rate, of the weights in float32."""
    row = Row(optim, lr=SMALL_RATE, settings={"optim_args": options} if options else {})
    trainer = make_trainer(
        folder, row, net=lambda: Net().to(dtype), num_train_epochs=40, logging_steps=240, lr_scheduler_type="constant"
    )
    trainer.train()
    shown = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    return shown[0], float(total(trainer.model))


def total(model: nn.Module) -> torch.Tensor:
    from .table import sentences

    with torch.no_grad():
        loss: torch.Tensor = model.float()(**torch.utils.data.default_collate(sentences()))["loss"]
    return loss


def test_at_a_small_rate_it_trains_as_float32_weights_do(tmp_path: Path) -> None:
    before = float(total(make_trainer(tmp_path, Row("adamw_torch"), net=lambda: Net().bfloat16()).model))
    _, expected = loss_after(tmp_path / "fp32", "adamw_torch", torch.float32)
    _, lost = loss_after(tmp_path / "plain", "adamw_torch", torch.bfloat16)
    assert before - expected > 0.02  # it learns something
    assert before - lost < 0.6 * (before - expected)  # and plain bfloat16 loses much of it
    for options in ("rounding=kahan", "rounding=stochastic", "moments=float32"):
        _, found = loss_after(tmp_path / options, "adamw_bf16", torch.bfloat16, options)
        assert found == pytest.approx(expected, rel=0.01), options


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_resumed_run_of_bf16_weights_is_the_uninterrupted_one(rounding: str, tmp_path: Path) -> None:
    row = Row("adamw_bf16", lr=1e-3, settings={"optim_args": f"rounding={rounding}"})
    settings: dict[str, Any] = {"net": lambda: Net(0.2).bfloat16(), "num_train_epochs": 2, "weight_decay": 0.1}
    whole = make_trainer(tmp_path / "whole", row, **settings)
    whole.train()
    first = make_trainer(tmp_path / "parts", row, callbacks=[StopAt(5)], **settings)
    first.train()
    second = make_trainer(tmp_path / "parts", row, **settings)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    assert differing(weights(second.model), weights(whole.model)) == {}
    kinds = {name: value.dtype for name, value in next(iter(second.optimizer.state.values())).items()}
    assert kinds["exp_avg_sq"] is torch.bfloat16
    assert [kinds[name] for name in REST if name in kinds] == ([*adamw_bf16.KINDS] if rounding == "kahan" else [])


@pytest.mark.process
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_processes_hold_equal_weights_and_resume_exactly(rounding: str, tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("adamw_bf16_in_processes.py"), rounding, folder=tmp_path)
    assert done.code == 0, done.out
    for engine in ("ddp", "fsdp2"):
        for told in done.told:
            assert told[engine] == {"resumed": True, "moved": True, "alike": True}, engine
