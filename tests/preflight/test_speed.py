"""`speed="auto"`: levers are timed by a clock of the test's, proved on the model, and kept, rejected or suggested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.journal.record import read
from trainwright.preflight import measure, speed
from trainwright.report.run_page import tables
from trainwright.support import loss_kernels
from trainwright.support.loss_kernels import chunked_cross_entropy

from .._support import two_processes
from .._support.small import Augmented, Diary, data, differing, make_trainer, models, weights


class Clock:
    """A second for each forward pass in training, and what a lever adds."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def watch(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda module, args: self.add(float(module.training)))
        return model

    def add(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Time of the measurement; a short run pays for it, nothing is compiled, and nothing is remembered from before."""
    made = Clock()
    values = {"now": made, "MIN_STEPS": 1, "MIN_STEPS_KNOWN": 1, "SHARE": 100.0, "COMPILE_S": 1e9, "WORKER_S": 0.0}
    for name, value in values.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def made(folder: Path, clock: Clock, build: Callable[[], nn.Module] = models.llama, **settings: Any) -> Any:
    chosen: dict[str, Any] = {"train_dataset": data.sequences(12), "max_steps": 4, "speed": "auto", **settings}
    return make_trainer(folder, model=clock.watch(models.seeded(build)), **chosen)


def kernel_that_takes(clock: Clock, seconds: float, factor: float = 1.0) -> loss_kernels.Kernel:
    def compute(*args: Any) -> Any:
        clock.add(seconds)
        total, losses = chunked_cross_entropy(*args)
        return total * factor, losses

    return compute


def row_of(choice: measure.Choice, name: str) -> measure.Row:
    return next(row for row in choice.rows if row.lever == name)


def test_a_lever_that_helps_is_kept_for_the_run_and_its_resume(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loss_kernels.KERNELS, "chunked", kernel_that_takes(clock, -0.5))
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer = made(tmp_path / "auto", clock, **saves, log_level="info")
    trainer.train()
    assert "speed     loss_kernel='chunked': a step in 0.50 x the time" in capsys.readouterr().out
    assert (trainer.args.loss_kernel, trainer.args.speed) == (None, "auto"), "the user's arguments are as they were"

    by_hand = made(tmp_path / "hand", clock, speed=None, loss_kernel="chunked", **saves)
    by_hand.train()
    assert not differing(weights(trainer.model), weights(by_hand.model))
    noted = json.loads((tmp_path / "auto" / "checkpoint-2" / "training_args.json").read_text())
    assert (noted["speed"], noted["loss_kernel"]) == ({"loss_kernel": "chunked"}, "chunked")

    rows = read(tmp_path / "auto").of("start")[0]["levers"]["rows"]
    assert {row["lever"]: row["result"].partition(":")[0] for row in rows if "samples" not in row["result"]} == {
        "loss kernel": "kept",
        "regional compile": "not measured",
        "workers": "not measured",
    }
    assert any("Levers of speed" in part and "loss_kernel=chunked" in part for part in tables(read(tmp_path / "auto")))

    monkeypatch.setattr(speed, "choose", lambda trainer: pytest.fail("a resume measures nothing"))
    resumed = made(tmp_path / "auto", clock, **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "auto" / "checkpoint-2"))
    assert not differing(weights(resumed.model), weights(by_hand.model))
    assert not [line for line in resumed._trainwright.run.resumed.changes if "loss_kernel" in line or "speed" in line]


def test_what_is_slow_wrong_or_draws_otherwise_is_not_taken(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_kernels.KERNELS, "chunked", kernel_that_takes(clock, 0.5))
    monkeypatch.setitem(loss_kernels.KERNELS, "cce", kernel_that_takes(clock, -0.5, factor=1.01))
    monkeypatch.setattr(loss_kernels, "PACKAGES", {})  # "cce" needs no GPU
    wanted = [
        measure.Lever("slow", {"loss_kernel": "chunked"}),
        measure.Lever("wrong", {"loss_kernel": "cce"}),
        measure.Lever("noisy", {"neftune_noise_alpha": 5.0}),
        measure.Lever("draws", {"neftune_noise_alpha": 0.0}),  # noise of size 0: other draws of dropout, and no effect
        measure.Lever("broken", {"neftune_noise_alpha": "much"}),
        measure.Lever("long", {}, setup_s=1e9),
    ]
    monkeypatch.setattr(measure.Measurement, "_levers", lambda self: iter(wanted))
    trainer = made(tmp_path, clock, lambda: models.llama(dropout=0.3))
    before = weights(trainer.model)
    states = torch.get_rng_state()
    choice = speed.choose(trainer)
    found = {row.lever: row.result for row in choice.rows}
    assert found["slow"] == "rejected: it is not faster"
    assert row_of(choice, "slow").ratio == 1.5
    assert "its loss differs from the plain one" in found["wrong"]
    assert "its result is another" in found["noisy"]
    assert found["draws"] == "rejected: it is not faster"
    assert row_of(choice, "draws").proof.startswith("without dropout")
    assert found["broken"].startswith("rejected: TypeError")
    assert found["long"].startswith("not measured: it may take")
    assert choice.settings == {}
    by_user = made(tmp_path / "kernel", clock, lambda: models.llama(dropout=0.3), loss_kernel="chunked")
    assert row_of(speed.choose(by_user), "draws").proof.startswith("without dropout")
    assert "forward" not in vars(by_user.model.lm_head), "afterwards the model is as it was"

    assert not differing(weights(trainer.model), before)
    assert torch.equal(torch.get_rng_state(), states)
    assert trainer.optimizer is None
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.train()
    plain = made(tmp_path / "plain", clock, lambda: models.llama(dropout=0.3), speed=None)
    plain.train()
    assert not differing(weights(trainer.model), weights(plain.model)), "to measure changes nothing"


def test_another_optimizer_is_compared_by_its_update(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        measure.Lever("fused optimizer", {"optim": "adamw_torch_fused"}, changes_update=True),
        measure.Lever("other", {"optim": "adafactor"}, changes_update=True),
    ]
    monkeypatch.setattr(measure.Measurement, "_levers", lambda self: iter(wanted))
    choice = speed.choose(made(tmp_path, clock, optim="adamw_torch"))
    assert row_of(choice, "fused optimizer").result == "rejected: it is not faster", "it computes the same"
    assert row_of(choice, "other").result.startswith("rejected: its update is another")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_steps": 3}, "nothing was measured: a run of 3 steps is too short to gain by it"),
        ({"train_dataset": data.Stream(data.sequences(4))}, "are a stream"),
        ({"torch_compile": True}, "torch_compile compiles the whole model"),
        ({"train_dataset": [{"input_ids": [1], "labels": ["x"]}] * 4}, "nothing was kept: "),
    ],
)
def test_it_gives_up_with_a_sentence(
    settings: dict[str, Any], reason: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MIN_STEPS_KNOWN", 4)
    choice = speed.choose(made(tmp_path, clock, **settings))
    assert reason in choice.note
    assert choice.settings == {}


class Slow(Diary):
    """Takes ten seconds of this process for each sample."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(data.sequences(24))
        self.clock = clock

    def __getitem__(self, index: int) -> Any:
        self.clock.add(10.0)
        return super().__getitem__(index)


@pytest.mark.process  # workers
def test_workers_read_where_their_batches_are_the_same(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    choice = speed.choose(made(tmp_path, clock, train_dataset=Slow(clock)))
    assert choice.settings == {"dataloader_num_workers": 1}
    monkeypatch.setattr(measure, "SLOW_READING", -1.0)
    drawn = make_trainer(tmp_path, train_dataset=Augmented(data.vectors(24)), max_steps=4, speed="auto")
    clock.watch(drawn.model)
    assert "samples draw random numbers" in row_of(speed.choose(drawn), "workers").result


RANKS = """
import os, sys
import torch
from tests._support.small import data, make_trainer, models, weights
from trainwright.preflight import measure, speed

if os.environ["RANK"] == "1":
    speed.choose = None  # only the main process measures
else:
    measure.MIN_STEPS, measure.MIN_STEPS_KNOWN, measure.SHARE = 1, 1, 1e6
    measure.COMPILE_S, measure.WORTH_KEEPING = 1e12, 1e6
    measure.Measurement._workers = measure.Measurement._split = lambda self: []
trainer = make_trainer(sys.argv[1], model=models.seeded(models.llama), train_dataset=data.sequences(12), max_steps=2,
                       speed="auto")
seen = []
trainer.model.register_forward_hook(lambda module, args, output: seen.append(output["logits"] is None))
trainer.train()
assert seen[-1] and trainer._trainwright.run is not None
torch.save(weights(trainer.model), f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


@pytest.mark.slow  # two processes, each with its own imports
@pytest.mark.process
def test_ranks_use_what_the_first_one_measured(tmp_path: Path) -> None:
    two_processes.run(RANKS, str(tmp_path), folder=tmp_path)
    assert not differing(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)))


@pytest.mark.slow  # inductor compiles the blocks three times
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_blocks_are_proved_and_kept(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COMPILE_S", 0.0)
    monkeypatch.setattr(measure, "WORTH_KEEPING", 1.0)
    regional = {"torch_compile": "regional", "torch_compile_backend": "inductor"}
    trainer = made(tmp_path / "auto", clock, loss_kernel="chunked")
    choice = speed.choose(trainer)
    assert choice.settings == regional, choice.note
    assert row_of(choice, "regional compile").proof.startswith("loss and gradients differ by")
    trainer.train()
    by_hand = made(tmp_path / "hand", clock, speed=None, loss_kernel="chunked", **regional)
    by_hand.train()
    assert not differing(weights(trainer.model), weights(by_hand.model))
    dropped = speed.choose(made(tmp_path / "drop", clock, lambda: models.llama(dropout=0.3), loss_kernel="chunked"))
    assert dropped.settings == regional
    assert row_of(dropped, "regional compile").proof.startswith("without dropout")


def test_a_fresh_run_takes_no_choice_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training_args.json").write_text('{"speed": {"tf32": true}}')
    args = make_trainer(tmp_path, speed="auto").args
    assert speed._noted(args, None) is None
    assert speed._noted(args, Checkpoint(tmp_path)).settings == {"tf32": True}
