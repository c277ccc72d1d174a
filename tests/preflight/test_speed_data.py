"""`speed="auto"` and the data: batches are split by length where a step stays the same, and times are remembered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForTokenClassification

from trainwright import Trainer
from trainwright.distributed.device import Kind
from trainwright.preflight import measure, padding, remembered, speed
from trainwright.preflight.padding import StepCost
from trainwright.support import patches

from .._support import two_processes
from .._support.small import StopAt, data, differing, make_trainer, models, weights

SPLIT = {
    "train_sampling_strategy": "batch_rebalance",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
}


class TokenClock:
    """A second for each token of a forward pass in training, and 8 for the pass."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def watch(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(self._add, with_kwargs=True)
        return model

    def _add(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            self.time += 8 + kwargs["input_ids"].numel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TokenClock:
    """Time of the measurement; a short run pays for it, and nothing is compiled."""
    made = TokenClock()
    values = {"now": made, "MIN_STEPS": 1, "MIN_STEPS_KNOWN": 1, "SHARE": 100.0, "COMPILE_S": 1e9, "WORKER_S": 1e9}
    for name, value in values.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def ragged(size: int) -> list[dict[str, Any]]:
    """Texts of 2 to 30 tokens: most are short."""
    g = torch.Generator().manual_seed(3)
    lengths = [2 + int(28 * torch.rand((), generator=g) ** 3) for _ in range(size)]
    tokens = [torch.randint(3, data.VOCAB, (length,), generator=g).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def made(folder: Path, clock: TokenClock, build: Callable[[], nn.Module] = models.llama, **parts: Any) -> Any:
    settings: dict[str, Any] = {
        "train_dataset": ragged(70),
        "data_collator": DataCollatorForTokenClassification(data.tokenizer()),
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2,
        "optim": "sgd",
        "speed": "auto",
    }
    return make_trainer(folder, model=clock.watch(models.seeded(build)), **(settings | parts))


def close(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(weights(ours).values(), weights(theirs).values(), strict=True)
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in pairs)


class Samples(Trainer):
    """Remembers the samples of each step, by their tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[list[tuple[int, ...]]] = []

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        rows = [row for batch in batches for row in batch["input_ids"].tolist()]
        self.steps.append(sorted(tuple(token for token in row if token) for row in rows))
        return batches, num_items


def test_batches_are_split_by_length_and_each_step_has_the_same_samples(
    clock: TokenClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made(tmp_path / "auto", clock, log_level="info")
    trainer.train()
    choice = trainer.args  # as the user wrote them
    assert (choice.per_device_train_batch_size, choice.gradient_accumulation_steps, choice.speed) == (16, 1, "auto")
    assert trainer._train_batch_size == 16
    said = capsys.readouterr().out
    assert (
        "speed     train_sampling_strategy='batch_rebalance', per_device_train_batch_size=4, "
        "gradient_accumulation_steps=4: a step in 0." in said
    )
    plain = made(tmp_path / "plain", clock, speed=None)
    plain.train()
    assert trainer.state.global_step == plain.state.global_step == 10
    assert close(trainer.model, plain.model), "each step has the same loss and gradients, up to rounding"
    assert differing(weights(trainer.model), weights(plain.model)), "and was computed in another way"
    by_hand = made(tmp_path / "hand", clock, speed=None, **SPLIT)
    by_hand.train()
    assert not differing(weights(trainer.model), weights(by_hand.model))

    steps = [
        made(tmp_path / name, clock, cls=Samples, speed=None, **settings)
        for name, settings in (("a", {}), ("b", SPLIT))
    ]
    for one in steps:
        one.train()
    assert steps[0].steps == steps[1].steps


def test_a_resume_takes_the_split_of_the_checkpoint(
    clock: TokenClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(tmp_path / "whole", clock, lambda: models.llama(dropout=0.2), save_strategy="no")
    whole.train()
    stopped = made(tmp_path / "cut", clock, lambda: models.llama(dropout=0.2), callbacks=[StopAt(3)])
    stopped.train()
    arguments = json.loads((tmp_path / "cut" / "checkpoint-3" / "training_args.json").read_text())
    assert {name: arguments[name] for name in SPLIT} == SPLIT == arguments["speed"]
    monkeypatch.setattr(speed, "choose", lambda trainer: pytest.fail("a resume measures nothing"))
    resumed = made(tmp_path / "cut", clock, lambda: models.llama(dropout=0.2))
    resumed.train(resume_from_checkpoint=True)
    assert not differing(weights(resumed.model), weights(whole.model))
    assert resumed._trainwright.run.resumed.changes == []
    monkeypatch.setattr(resumed.args, "per_device_train_batch_size", 32)
    longer = speed._for_step_size(arguments["speed"], 32)
    assert longer == SPLIT | {"per_device_train_batch_size": 8}
    assert speed._for_step_size(arguments["speed"] | {"optim": "sgd"}, 6) == {"optim": "sgd"}


def test_evaluations_of_such_a_run_are_sorted_by_length(clock: TokenClock, tmp_path: Path) -> None:
    parts = {"eval_dataset": ragged(40), "per_device_eval_batch_size": 4, "eval_strategy": "epoch"}
    choice = speed.choose(made(tmp_path, clock, **parts))
    (row,) = [row for row in choice.rows if row.lever == "evaluation sorted by length"]
    assert row.is_kept
    assert row.ratio is not None
    assert row.ratio < 0.8
    assert choice.settings == SPLIT | {"eval_sampling_strategy": "by_length"}
    for other in ({"eval_strategy": "no"}, {"eval_dataset": {"a": data.sequences(40)}}, {"dataloader_drop_last": True}):
        assert "eval_sampling_strategy" not in speed.choose(made(tmp_path, clock, **(parts | other))).settings


class SeesItsBatch(nn.Module):
    """A loss that depends on which samples share a batch, as one with negatives from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCAB, 8)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        pooled = self.embedding(input_ids).mean(dim=1)
        return {"loss": nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))}


def test_a_loss_that_depends_on_the_batch_is_not_split(clock: TokenClock, tmp_path: Path) -> None:
    choice = speed.choose(made(tmp_path, clock, SeesItsBatch))
    (row,) = [row for row in choice.rows if row.lever == "batches split by length"]
    assert row.result.startswith("rejected: its result is another")
    assert choice.settings == {}


class OwnOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(
    "parts",
    [
        {"dataloader_drop_last": True},
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "sequential"},
        {"max_tokens_per_batch": 64, "per_device_train_batch_size": 8},
        {"cls": OwnOrder},
        {"per_device_train_batch_size": 2},
        {"train_dataset": [{"input_ids": [4] * 8, "labels": [4] * 8}] * 40},
    ],
    ids=str,
)
def test_batches_that_must_stay_are_not_split(parts: dict[str, Any], clock: TokenClock, tmp_path: Path) -> None:
    choice = speed.choose(made(tmp_path, clock, **parts))
    assert choice.settings == {}, choice.note
    assert "nothing was kept" not in choice.note


RANKS = """
import os, sys
from pathlib import Path
import torch
from tests._support.small import weights
from tests.preflight import test_speed_data as cases
from trainwright.preflight import measure

clock = cases.TokenClock()
measure.now, measure.MIN_STEPS, measure.MIN_STEPS_KNOWN, measure.SHARE, measure.COMPILE_S = clock, 1, 1, 100.0, 1e9
for name, speed in (("plain", None), ("auto", "auto")):
    folder = Path(sys.argv[1]) / name
    trainer = cases.made(folder, clock, speed=speed, per_device_train_batch_size=8, log_level="info")
    trainer.train()
    torch.save(weights(trainer.model), folder / f"{os.environ['RANK']}.pt")
"""


@pytest.mark.process
def test_two_processes_split_what_they_share_by_length(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = two_processes.run(RANKS, str(tmp_path), folder=tmp_path, environment=cache)
    assert done.out.count("train_sampling_strategy='batch_rebalance', per_device_train_batch_size=") == 1
    plain, auto = ([torch.load(tmp_path / way / f"{rank}.pt") for rank in (0, 1)] for way in ("plain", "auto"))
    for ranks in (plain, auto):
        assert not differing(*ranks), "the processes have the same weights"
    assert differing(plain[0], auto[0]), "they were computed in another way"
    for name, expected in plain[0].items():
        assert torch.allclose(auto[0][name], expected, rtol=1e-4, atol=1e-6), name


def test_other_samples_in_a_step_are_suggested_as_arguments(clock: TokenClock, tmp_path: Path) -> None:
    choice = speed.choose(made(tmp_path, clock, per_device_train_batch_size=4))
    rows = [row for row in choice.rows if row.is_suggested]
    assert {"token budget", "packing"} <= {row.lever for row in rows}
    assert [row.line() for row in rows] == choice.lines()[1:]
    for row in rows:
        typed = eval(f"dict({row.line().removeprefix('suggested: ').partition(' (about 0.')[0]})")
        assert typed == row.settings
        how = {"speed": None, "per_device_train_batch_size": 8} | typed
        assert [*made(tmp_path / "run", clock, **how).get_train_dataloader()]


def test_padding_inside_of_samples_is_named(clock: TokenClock, tmp_path: Path) -> None:
    items = [{**item, "attention_mask": [1, 1, *[0] * (len(item["input_ids"]) - 2)]} for item in data.sequences(70)]
    (line,) = speed.choose(made(tmp_path, clock, train_dataset=items)).lines()[1:]
    assert "of the tokens of the samples are padding" in line


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock: the measurement takes the CPU for a device with matrix units and graphs, of which there is none here."""
    monkeypatch.setattr(measure, "get_kind", lambda device: Kind(captures_graphs=True))


class TileClock(TokenClock):
    """Counts a width that is no multiple of 8 twice."""

    def _add(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        super()._add(module, args, kwargs)
        if module.training and kwargs["input_ids"].shape[1] % 8:
            self.time += kwargs["input_ids"].numel()


@pytest.mark.usefixtures("on_a_gpu")
def test_half_precision_pads_to_multiples_where_that_is_faster(
    clock: TokenClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = TileClock()
    monkeypatch.setattr(measure, "now", tiles)
    monkeypatch.setattr(measure.Measurement, "_split", lambda self: [])
    collator = DataCollatorForTokenClassification(data.tokenizer())
    trainer = made(tmp_path / "auto", tiles, bf16=True, data_collator=collator, num_train_epochs=1)
    widths: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer.train()
    assert [width % 8 for width in widths[-5:]] == [0] * 5, "of the five steps"
    assert trainer.data_collator is collator, "the user's collator is in place again"
    assert collator.pad_to_multiple_of is None
    assert speed.choose(trainer).settings == {"pad_to_multiple_of": 8}
    plain = speed.choose(made(tmp_path / "fp32", tiles, data_collator=collator))
    assert not [row for row in plain.rows if row.lever == "padding to multiples"], "which fp32 would not gain from"


class Tried:
    """Takes the place of a compiler, and notes the mode that it was asked for."""

    def __init__(self) -> None:
        self.modes: list[str | None] = []

    @contextlib.contextmanager
    def __call__(self, model: nn.Module, *, backend: str | None, mode: str | None) -> Iterator[None]:
        self.modes.append(mode)
        yield


@pytest.mark.usefixtures("on_a_gpu")
def test_blocks_are_captured_only_where_one_shape_comes_again(
    clock: TokenClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Tried()
    monkeypatch.setattr(measure, "has_compiler", lambda device: True)
    monkeypatch.setattr(measure, "COMPILE_S", 0.0)
    monkeypatch.setattr(patches, "compiled_blocks", compiler)
    many = speed.choose(made(tmp_path / "many", clock))
    row = next(row for row in many.rows if row.lever == "captured blocks")
    assert row.result.startswith("rejected: the first micro-batches have ")
    assert compiler.modes, [row.line() for row in many.rows]
    assert "reduce-overhead" not in compiler.modes
    same = speed.choose(made(tmp_path / "same", clock, train_dataset=[{"input_ids": [4] * 8, "labels": [4] * 8}] * 64))
    row = next(row for row in same.rows if row.lever == "captured blocks")
    assert row.result == "rejected: it is not faster", "this compiler changes nothing"
    assert row.proof.startswith("loss and gradients differ by")
    assert "reduce-overhead" in compiler.modes


def test_lengths_that_take_long_to_read_are_left_to_the_user(
    clock: TokenClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            clock.time += 1e4
            return super().__getitem__(index)

    monkeypatch.setattr(measure, "SHARE", 0.1)
    choice = speed.choose(made(tmp_path, clock, train_dataset=Slow(ragged(70))))
    (row,) = [row for row in choice.rows if row.lever == "batches split by length"]
    assert row.result.startswith("suggested: to read the lengths of all samples takes about")


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_times_are_remembered_and_proofs_are_made_again(clock: TokenClock, tmp_path: Path) -> None:
    first = speed.choose(made(tmp_path, clock))
    spent = clock.time
    again = speed.choose(made(tmp_path, clock))
    assert (again.settings, "with times of earlier runs" in again.note) == (first.settings, True)
    assert clock.time - spent < spent / 2
    assert again.rows[0] == first.rows[0]
    assert again.rows[0].proof
    assert again.rows[1].result == "rejected: it was not faster in an earlier run"
    assert len([*remembered.folder().iterdir()]) == 1
    speed.choose(made(tmp_path, clock, per_device_train_batch_size=8))
    speed.choose(made(tmp_path, clock, models.gpt2))
    assert len([*remembered.folder().iterdir()]) == 3, "another model, or other shapes"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"cost": {"per_step_s": "x", "per_batch_s": 1, "per_token_s": 1}, "ratios": {}}',
        '{"cost": {"per_step_s": NaN, "per_batch_s": 1, "per_token_s": 1}, "ratios": {}}',
        '{"cost": {"per_step_s": true, "per_batch_s": 1, "per_token_s": 1}, "ratios": {}}',
        '{"cost": null, "ratios": {"loss_kernel": -1}}',
        '{"cost": null, "ratios": []}',
        "[" * 100_000,
        "\x00" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_counts_as_absent(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered.folder().mkdir(parents=True)
    (remembered.folder() / "x.json").write_text(text)
    assert remembered.read("x") == remembered.Measured()
    known = remembered.Measured(StepCost(1.0, 2.0, 3.0), {"a": 0.5})
    remembered.write("x", known, {})
    remembered.write("x", remembered.Measured(ratios={"b": 2.0}), {})
    assert remembered.read("x") == remembered.Measured(known.cost, {"a": 0.5, "b": 2.0})


def test_a_directory_that_cannot_be_written_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remembered.write("x", remembered.Measured(), {})
    assert remembered.read("x") == remembered.Measured()


# -- what padding costs ------------------------------------------------------------------------------------------------

COSTS = st.builds(StepCost, st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))


@given(COSTS, st.integers(1, 50), st.integers(51, 500))
def test_the_costs_are_those_of_the_measured_steps(cost: StepCost, tokens: int, large: int) -> None:
    times = (cost.seconds(1, tokens), cost.seconds(2, 2 * tokens), cost.seconds(1, large))
    found = StepCost.through(*times, tokens=tokens, large_tokens=large)
    for num_batches, num_tokens in ((1, tokens), (2, 2 * tokens), (1, large), (7, 900)):
        assert found.seconds(num_batches, num_tokens) == pytest.approx(cost.seconds(num_batches, num_tokens), abs=1e-6)


@given(st.lists(st.integers(1, 100), min_size=96, max_size=300), COSTS, st.sampled_from([1, 2, 3]))
def test_a_split_is_chosen_only_if_it_takes_less_time(lengths: list[int], cost: StepCost, processes: int) -> None:
    found = np.array(lengths)
    window = 32 * processes
    split = padding.best_split(found, batch_size=16, micro_batches=2, cost=cost, processes=processes)
    num_steps = len(lengths) // window
    for tokens in (padding.split_tokens(found, window, 2, processes), padding.step_tokens(found, 16, 2, processes)):
        assert tokens * processes >= sum(lengths[: num_steps * window]) / num_steps, "the slowest has the mean at least"
    if split is not None:
        assert split.num_groups in (4, 8, 16)
        assert split.ratio < 1


def test_the_worked_example() -> None:
    cost = StepCost(5, 10, 1)
    lengths = np.array([48, 30, 20, 10])
    assert padding.step_tokens(lengths, 4, 1, 1) == padding.plain_tokens(lengths, 4)
    assert cost.seconds(1, padding.step_tokens(lengths, 4, 1, 1)) == 207
    assert cost.seconds(2, padding.split_tokens(lengths, 4, 2, 1)) == 163
    assert padding.step_tokens(lengths, 2, 1, 2) == 2 * 48, "two processes, and the one with the longest counts"
