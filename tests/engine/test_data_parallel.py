"""Several GPUs in one process. No two GPUs are here, so a double stands in for how DataParallel cuts, copies and joins
across devices; which parts it is given and what is made of what it returns is what these tests look at. The real thing
runs in `tests/distributed/test_nccl.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainingArguments
from trainwright.config.plans import EnginePlan, PrecisionPlan
from trainwright.distributed.world import World
from trainwright.engine.data_parallel import DataParallelEngine, ReplicatedModel

from .._support.data_parallel_double import DEVICES, Double, two_devices
from ..distributed.cases import CountsItems, accuracy, rows
from ..parity import data, models
from ..parity.sides import OURS, without_clock


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    monkeypatch.setattr(World, "n_gpu", DEVICES)
    with two_devices() as double:
        yield double


# name -> (model, samples); the last batches of 22 and 17 are cut into unequal parts
CASES: dict[str, Any] = {
    "means": (lambda: models.ReturnsDict(0.0), data.vectors(22)),
    "counted": (CountsItems, rows(17)),
}


def trainer_of(case: str, folder: Path, *, devices: int, **more: Any) -> Any:
    build, items = CASES[case]
    settings = {
        "per_device_train_batch_size": 8 // devices,
        "per_device_eval_batch_size": 4 // devices,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "num_train_epochs": 2,
        "seed": 5,
        "gradient_accumulation_steps": 2,
    }
    parts = {"train_dataset": items, "eval_dataset": items[:7], "compute_metrics": accuracy}
    return OURS.make(models.seeded(build), folder, settings | more, **parts)


@pytest.mark.framework  # accelerate imports DeepSpeed to unwrap a model, where it is installed
@pytest.mark.parametrize("case", CASES)
def test_two_devices_train_and_evaluate_as_one(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    alone = trainer_of(case, tmp_path / "one", devices=1)
    alone.train()
    double = request.getfixturevalue("double")
    both = trainer_of(case, tmp_path / "two", devices=DEVICES)
    both.train()
    assert type(both.model_wrapped) is ReplicatedModel
    assert both.accelerator.unwrap_model(both.model_wrapped) is both.model
    assert {len(parts) for parts in double.parts} <= {1, DEVICES}
    logs = [without_clock(one.state.log_history) for one in (both, alone)]
    for mine, other in zip(*logs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    for name, value in both.model.state_dict().items():
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    mine, other = (without_clock([one.evaluate()])[0] for one in (both, alone))
    assert mine == pytest.approx(other, rel=1e-5)
    predicted, expected = (one.predict(one.eval_dataset).predictions for one in (both, alone))
    torch.testing.assert_close(torch.tensor(predicted), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_batch_is_for_all_devices(double: Double, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=3, per_device_eval_batch_size=5, use_cpu=True)
    assert (args.n_gpu, args.parallel_mode.value) == (DEVICES, "not_distributed")
    assert (args.train_batch_size, args.eval_batch_size) == (6, 10)
    args._n_gpu = 1  # what scripts do to use one of several
    assert (args.n_gpu, args.parallel_mode.value) == (1, "not_parallel")
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)


def test_a_model_that_lies_on_several_devices_is_not_copied(double: Double, tmp_path: Path) -> None:
    model = models.seeded(lambda: models.ReturnsDict(0.0))
    model.hf_device_map = {"layer": 0, "head": 1}
    trainer = OURS.make(model, tmp_path, {"max_steps": 1}, train_dataset=data.vectors(8))
    trainer.train()
    assert trainer.args.n_gpu == 1
    assert trainer.model_wrapped is model


def test_a_quantised_model_stays_on_one(double: Double, tmp_path: Path) -> None:
    model = models.seeded(lambda: models.ReturnsDict(0.0))
    model.is_loaded_in_8bit = True
    trainer = OURS.make(model, tmp_path, {"max_steps": 1}, train_dataset=data.vectors(8))
    trainer.train()
    assert trainer.model_wrapped is model


def test_the_count_of_items_reaches_every_device_whole(double: Double, tmp_path: Path) -> None:
    copies = ReplicatedModel(CountsItems(), torch.device("cpu"), None)
    batch = {name: torch.stack([row[name] for row in rows(5)]) for name in ("x", "labels")}
    told = copies(**batch, num_items_in_batch=torch.tensor(11))
    alone = copies.module(**batch, num_items_in_batch=torch.tensor(11))
    assert [int(part["num_items_in_batch"]) for part in double.parts[0]] == [11, 11]
    assert [len(part["x"]) for part in double.parts[0]] == [3, 2]
    torch.testing.assert_close(told["loss"], alone["loss"])
    torch.testing.assert_close(told["logits"], alone["logits"])


class Balanced(nn.Module):
    """Its loss has an auxiliary part, a mean over the samples, as a mixture of experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, num_items_in_batch: Any = None) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        auxiliary = x.mean()
        return {"loss": out.sum() / num_items_in_batch + 0.5 * auxiliary, "aux_loss": auxiliary, "out": out}


def test_an_auxiliary_loss_is_no_share_of_the_sum(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.support.model_facts.auxiliary_coefficient", lambda model: 0.5)
    copies = ReplicatedModel(Balanced(), torch.device("cpu"), None)
    x = torch.randn(5, 2)
    told = copies(x=x, num_items_in_batch=torch.tensor(7))
    alone = copies.module(x=x, num_items_in_batch=7)
    for name, value in alone.items():
        torch.testing.assert_close(told[name], value)


def test_outputs_without_a_loss_are_only_joined(double: Double) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x[:, 0]

    x = torch.randn(5, 2)
    doubled, column = ReplicatedModel(Pair(), torch.device("cpu"), None)(x=x)
    torch.testing.assert_close(doubled, x * 2)
    torch.testing.assert_close(column, x[:, 0])


def test_half_precision_is_inside_of_each_copy(double: Double) -> None:
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)
            seen.append(out.dtype)
            return {"out": out}

    out = ReplicatedModel(Looks(), torch.device("cpu"), torch.bfloat16)(x=torch.randn(4, 2))["out"]
    assert seen == [torch.bfloat16] * DEVICES
    assert out.dtype == torch.float32


def test_fp8_has_no_effect_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchao")  # without a package for fp8 accelerate refuses it
    engine = DataParallelEngine(EnginePlan(device="cpu", num_devices=2, precision=PrecisionPlan(mixed="fp8")))
    assert re.search(r"fp8 has no effect.*2 GPUs.*torchrun", caplog.text)
    model = nn.Linear(32, 32)
    copies = engine.setup_for_evaluation(model)
    with engine.mixed_precision(copies):
        assert copies(torch.ones(16, 32)).equal(model(torch.ones(16, 32)))
    assert type(engine.unwrap(copies)) is nn.Linear
