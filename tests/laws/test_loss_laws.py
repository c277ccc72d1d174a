"""Whatever a loss does with the number of items, a step is the mean over its samples, and asking it leaves no trace."""

from __future__ import annotations

import collections
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import trainwright
from trainwright.distributed.world import World

from .._support.data_parallel_double import DEVICES, two_devices
from .._support.two_processes import run
from ..parity.sides import without_clock
from . import losses, losses_of_two
from .losses import ROWS, IgnoresKeywords, Row, cross_entropy, make, weights

CPU = {"DS_ACCELERATOR": "cpu"}
CLOSE = {"rtol": 1e-4, "atol": 2e-6}
rows = pytest.mark.parametrize("name", ROWS)


def trained(row: Row, folder: Path, *, batch: int, micro_batches: int, **settings: Any) -> Any:
    trainer = make(trainwright, row, folder, batch=batch, micro_batches=micro_batches, **row.settings, **settings)
    trainer.train()
    return trainer


def assert_close(one: Any, other: Any) -> None:
    assert losses.losses(one) == pytest.approx(losses.losses(other), rel=1e-4)
    others = weights(other)
    for name, value in weights(one).items():
        torch.testing.assert_close(value, others[name], **CLOSE)


def assert_same(one: Any, other: Any) -> None:
    assert losses.losses(one) == losses.losses(other)
    others = weights(other)
    assert [name for name, value in weights(one).items() if not torch.equal(value, others[name])] == []


@rows
def test_a_step_is_the_batch_of_all_its_micro_batches(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    whole = trained(row, tmp_path, batch=8, micro_batches=1)
    assert "num_items_in_batch" not in capsys.readouterr().out
    for micro_batches in (2, 4):
        assert_close(trained(row, tmp_path, batch=8 // micro_batches, micro_batches=micro_batches), whole)
        out = capsys.readouterr().out
        words = {"mean": "mean over the ", "divided": "sum over the "}
        said = next((line for line in out.splitlines() if line.startswith("loss ")), "")
        if row.finding is not None:
            assert said.startswith(f"loss      {words[row.finding]}")
            assert "num_items_in_batch" in said
        else:
            assert "divide" not in said


@rows
def test_on_several_devices_of_a_process_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    whole = trained(row, tmp_path, batch=8, micro_batches=1, is_even=True)
    monkeypatch.setattr(World, "n_gpu", DEVICES)
    for micro_batches in (1, 2):
        with two_devices():
            parts = trained(
                row, tmp_path, batch=8 // micro_batches // DEVICES, micro_batches=micro_batches, is_even=True
            )
        assert_close(parts, whole)


@pytest.mark.framework
@rows
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_reproduce_gives_the_bits_of_the_original(name: str, micro_batches: int, tmp_path: Path) -> None:
    row = ROWS[name]
    if not row.trains_there:
        pytest.skip("the original ends in a TypeError")
    shape = {"batch": 8 // micro_batches, "micro_batches": micro_batches, "remove_unused_columns": False}
    theirs = make(transformers, row, tmp_path, **shape)
    theirs.train()
    ours = make(trainwright, row, tmp_path, **shape, reproduce="transformers")
    ours.train()
    assert_same(ours, theirs)


# -- asking ------------------------------------------------------------------------------------------------------------


class Remembers(trainwright.Trainer):
    """A loss that draws numbers, counts, records, logs, changes its batch, and remembers what it saw."""

    divides = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_calls = 0
        self.seen: dict[str, list[float]] = collections.defaultdict(list)
        self.newest: collections.deque[float] = collections.deque(maxlen=3)
        self.average = torch.zeros(())
        self.center = nn.BatchNorm1d(8, affine=False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        given = inputs.pop("labels")
        labels = given.clone()
        given.zero_()
        outputs = model(**inputs)
        logits = outputs["logits"]
        loss = cross_entropy(logits, labels, num_items_in_batch if self.divides else None)
        self.num_calls += 1
        self.seen["loss"].append(float(loss.detach()))
        self.newest.append(float(loss.detach()))
        self.average.mul_(0.9).add_(loss.detach())
        self.latest = float(loss.detach())
        self.center(logits.detach()[..., :8].flatten(0, 1))
        self.record("mean_logit", logits.mean())
        if self.num_calls == 1:
            self.log({"first": float(loss.detach())})
        return (loss, outputs) if return_outputs else loss


class RemembersSums(Remembers):
    divides = True


class Stateful(IgnoresKeywords):
    """Has buffers that it changes in place, replaces, and makes when they are needed, and a number that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("first", None)
        self.num_calls = 0

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = self.dropout(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        self.average = 0.5 * self.average + hidden.detach().mean((0, 1))
        if self.first is None:
            self.first = hidden.detach()[0, 0]
        self.num_calls += 1
        return {"logits": self.head(hidden)}


@pytest.mark.parametrize("cls", [Remembers, RemembersSums])
@pytest.mark.parametrize("drives_itself", [False, True])
def test_asking_leaves_no_trace(cls: Any, drives_itself: bool, tmp_path: Path) -> None:
    """A run that asks is a run that is told, to the bit."""
    ends = []
    for told in (None, cls.divides):
        kind = type(cls.__name__, (cls,), {"loss_is_scaled_for_ga": told})
        row = Row(Stateful, functools.partial(always, kind))
        trainer = make(trainwright, row, tmp_path, batch=2, micro_batches=4, loss_weighting="batches")
        if drives_itself:
            for step in trainer.steps():
                for batch in step.batches:
                    step.backward(trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items))
                step.update()
        else:
            trainer.train()
        ends.append(trainer)
    asked, settled = ends
    assert_same(asked, settled)
    assert (asked.num_calls, asked.model.num_calls) == (8, 8)
    assert asked.seen == settled.seen
    assert asked.newest == settled.newest
    assert asked.latest == settled.latest
    assert torch.equal(asked.average, settled.average)
    assert torch.equal(asked.center.running_mean, settled.center.running_mean)
    assert without_clock(asked.state.log_history) == without_clock(settled.state.log_history)


def always(kind: type, lib: Any) -> type:
    """Returns a class, whatever the library."""
    return kind


CALLS: list[float] = []  # a global, which is not put back: what a closure holds is


def calls_of(row: Row, folder: Path, **how: Any) -> list[float]:
    """The numbers of items with which the loss of a row is computed, in order."""
    CALLS.clear()

    def counting(lib: Any) -> type:
        class Counting(row.trainer(lib)):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                CALLS.append(float(kwargs["num_items_in_batch"] or 0))
                return super().compute_loss(model, inputs, *args, **kwargs)

        return Counting

    make(trainwright, Row(row.model, counting, row.parts), folder, is_even=True, **how).train()
    return [*CALLS]


def test_the_loss_is_asked_once_where_it_matters(tmp_path: Path) -> None:
    row = ROWS["override ignores"]
    assert calls_of(row, tmp_path, batch=8, micro_batches=1) == [48.0] * 2
    assert calls_of(row, tmp_path, batch=2, micro_batches=4) == [96.0] + [48.0] * 8
    assert calls_of(row, tmp_path, batch=2, micro_batches=4, reproduce="transformers") == [48.0] * 8
    assert calls_of(row, tmp_path, batch=2, micro_batches=4, loss_weighting="original") == [48.0] * 8


@pytest.mark.parametrize("name", ["causal", "BERT", "classifier", "adapter", "plain"])
def test_a_known_model_is_not_asked(name: str, tmp_path: Path) -> None:
    model = ROWS[name].model()
    calls = []
    handle = model.register_forward_pre_hook(lambda *args: calls.append(1))
    trained(Row(lambda: model), tmp_path, batch=2, micro_batches=4)
    handle.remove()
    assert len(calls) == 8


DECLARED: dict[str, tuple[str, dict[str, Any], float]] = {
    # row, attributes of the trainer, factor of the first loss
    "scaled": ("override ignores", {"loss_is_scaled_for_ga": True}, 4.0),
    "mean": ("override uses", {"loss_is_scaled_for_ga": False}, 0.25),
    "class attribute": ("module uses keywords", {"model_accepts_loss_kwargs": False}, 1.0),
    "scaled by attribute": ("module ignores keywords", {"model_accepts_loss_kwargs": True}, 4.0),
}


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("in_constructor", [False, True])
def test_what_the_user_declares_is_believed(name: str, in_constructor: bool, tmp_path: Path) -> None:
    row, attributes, factor = DECLARED[name]
    base: Any = ROWS[row].trainer(trainwright)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    kind = type("Declares", (base,), {"__init__": init} if in_constructor else attributes)
    declared = Row(ROWS[row].model, lambda lib: kind)
    whole = make(trainwright, ROWS[row], tmp_path, batch=8, micro_batches=1, is_even=True)
    whole.train()
    parts = make(trainwright, declared, tmp_path, batch=2, micro_batches=4, is_even=True)
    parts.train()
    assert losses.losses(parts)[0] == pytest.approx(factor * losses.losses(whole)[0], rel=1e-4)


@pytest.mark.parametrize("name", ["override ignores", "module ignores keywords", "loss function ignores"])
def test_loss_weighting_says_how_a_mean_is_weighted(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    whole, items, batches, original = (
        losses.losses(make_and_train(row, tmp_path, weighting, micro_batches))[0]
        for weighting, micro_batches in ((None, 1), ("items", 4), ("batches", 4), ("original", 4))
    )
    means = losses.losses(make_and_train(row, tmp_path, None, 1, batch=2, learning_rate=0.0, max_steps=4))
    assert items == pytest.approx(whole, rel=1e-5)
    assert batches == pytest.approx(sum(means) / 4, rel=1e-4)
    assert original == pytest.approx(sum(means), rel=1e-4)
    assert batches != pytest.approx(items, rel=1e-4)


def make_and_train(row: Row, folder: Path, weighting: str | None, micro_batches: int, **settings: Any) -> Any:
    how = {"batch": 8 // micro_batches, "loss_weighting": weighting, **settings}
    trainer = make(trainwright, row, folder, micro_batches=micro_batches, **how)
    trainer.train()
    return trainer


# -- losses that cannot be asked, or answer something else -------------------------------------------------------------


def overriding(compute: Any) -> Row:
    def trainer(lib: Any) -> type:
        class Own(lib.Trainer):  # type: ignore[misc, name-defined]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                return compute(self, model, inputs, num_items_in_batch)

        return Own

    return Row(IgnoresKeywords, trainer)


def logits_loss(model: Any, inputs: Any, num_items: Any = None) -> torch.Tensor:
    return cross_entropy(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"], num_items)


def distilled(self: Any, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
    return logits_loss(model, inputs, num_items) + 0.5 * model.embed.weight.pow(2).mean()


def raises_the_second_time(self: Any, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
    if float(num_items) == float(2 * self.items_of_first_window):
        raise LookupError("no such number")
    return logits_loss(model, inputs)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (distilled, r"a loss of [\d.]+ for num_items_in_batch=\d+ and of [\d.]+ for twice"),
        (raises_the_second_time, "no such number"),
    ],
)
def test_any_other_answer_is_a_warning_and_the_arithmetic_of_the_original(
    compute: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = overriding(compute)
    shape: dict[str, Any] = {"batch": 4, "micro_batches": 2}
    asked = make(trainwright, row, tmp_path, **shape)
    asked.items_of_first_window = sum((one["labels"] != losses.IGNORED).sum() for one in losses.samples()[:8])
    with caplog.at_level(logging.WARNING):
        asked.train()
    warned = [one.getMessage() for one in caplog.records if "loss_is_scaled_for_ga" in one.getMessage()]
    assert len(warned) == 1
    assert re.search(words, warned[0])
    original = make(trainwright, row, tmp_path, **shape, loss_weighting="original")
    original.items_of_first_window = 0
    original.train()
    assert_same(asked, original)


def test_a_loss_that_takes_gradients_itself_is_asked_with_gradients(tmp_path: Path) -> None:
    def penalised(self: Any, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        loss = logits_loss(model, inputs)
        (slope,) = torch.autograd.grad(loss, model.head.bias, create_graph=True)
        return loss + 0.0 * slope.pow(2).sum()

    row = overriding(penalised)
    whole = trained(row, tmp_path, batch=8, micro_batches=1)
    assert_close(trained(row, tmp_path, batch=2, micro_batches=4), whole)


def test_a_loss_of_zero_is_asked_again(tmp_path: Path) -> None:
    """The first micro-batch says nothing: the second one does."""

    def late(self: Any, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        loss = logits_loss(model, inputs)
        return loss * float(inputs["input_ids"][0, 0] != self.first)

    row = overriding(late)
    ends = []
    for batch, micro_batches in ((2, 4), (2, 1)):
        trainer = make(trainwright, row, tmp_path, batch=batch, micro_batches=micro_batches, is_even=True, max_steps=1)
        trainer.first = trainer.train_dataset[0]["input_ids"][0] if micro_batches == 4 else -1
        trainer.train()
        ends.append(losses.losses(trainer)[0])
    assert ends[0] < 1.2 * ends[1]


def labels_by_another_name(number: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": one["input_ids"], "targets": one["labels"]} for one in losses.samples(number, is_even=True)]


class Targets(losses.Plain):
    def forward(self, input_ids: Any, targets: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {**self.outputs(input_ids, None), "targets": targets}


def mean_of_targets(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"], outputs["targets"])


def train_on_targets(lib: Any, folder: Path, micro_batches: int, **settings: Any) -> Any:
    row = Row(Targets, parts={"compute_loss_func": mean_of_targets})
    trainer = make(lib, row, folder, batch=8 // micro_batches, micro_batches=micro_batches, **settings)
    trainer.train_dataset = labels_by_another_name()
    trainer.train()
    return trainer


def test_a_loss_function_without_a_count_is_a_mean(tmp_path: Path) -> None:
    whole = train_on_targets(trainwright, tmp_path, 1)
    assert_close(train_on_targets(trainwright, tmp_path, 4), whole)


@pytest.mark.framework
def test_reproduce_adds_up_the_means_of_a_loss_function_without_a_count(tmp_path: Path) -> None:
    theirs = train_on_targets(transformers, tmp_path, 4)
    assert_same(train_on_targets(trainwright, tmp_path, 4, reproduce="transformers"), theirs)


def test_an_error_of_the_loss_itself_is_raised_as_it_is(tmp_path: Path) -> None:
    def fails(self: Any, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        trained(overriding(fails), tmp_path, batch=2, micro_batches=4)


def test_loss_outputs_say_themselves_what_they_are(tmp_path: Path) -> None:
    def says(self: Any, model: Any, inputs: Any, num_items: Any) -> Any:
        return trainwright.LossOutput(logits_loss(model, inputs), num_items=(inputs["labels"] != -100).sum())

    whole = trained(overriding(says), tmp_path, batch=8, micro_batches=1)
    assert_close(trained(overriding(says), tmp_path, batch=2, micro_batches=4), whole)


# -- when and where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["override ignores", "override uses", "module ignores keywords"])
def test_a_batch_that_is_cut_later_asks_then(name: str, tmp_path: Path) -> None:
    """`auto_find_batch_size`: until a batch does not fit, a window is one batch."""
    row = ROWS[name]
    whole = trained(row, tmp_path, batch=8, micro_batches=1)
    sizes: list[int] = []

    def fills_memory(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(len(kwargs["input_ids"]))
        if len(sizes) > 1 and sizes[-1] > 2:  # the first step fits
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")

    def model() -> nn.Module:
        made = row.model()
        made.register_forward_pre_hook(fills_memory, with_kwargs=True)
        return made

    cut = trained(Row(model, row.trainer), tmp_path, batch=8, micro_batches=1, auto_find_batch_size=True)
    assert_close(cut, whole)
    assert sizes == [8, 8, 4, 2, 2, 2, 2, 2]


def test_windows_that_are_prepared_ask(tmp_path: Path) -> None:
    class Cuts(losses.ignores(trainwright)):  # type: ignore[misc]
        def prepare_window(self, batches: list[Any]) -> list[Any]:
            return [{name: value[i : i + 2] for name, value in batches[0].items()} for i in range(0, 8, 2)]

    whole = trained(ROWS["override ignores"], tmp_path, batch=8, micro_batches=1)
    row = Row(losses.llama, lambda lib: Cuts)
    assert_close(trained(row, tmp_path, batch=8, micro_batches=1), whole)


@pytest.mark.parametrize("name", ["override ignores", "override uses", "module ignores keywords"])
def test_a_resume_knows_the_answer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[name]
    shape: dict[str, Any] = {"batch": 2, "micro_batches": 4}
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = make(trainwright, row, tmp_path, **shape, **saves)
    whole.train()
    told = [
        json.loads(line)
        for path in tmp_path.rglob("*journal*")
        if path.is_file()
        for line in path.read_text().splitlines()
    ]
    assert [one["finding"] for one in told if one["kind"] == "loss"] == [row.finding]
    capsys.readouterr()
    resumed = make(trainwright, row, tmp_path, **shape, **saves)
    calls: list[int] = []
    resumed.model.register_forward_pre_hook(lambda *args: calls.append(1))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(calls) == 4
    assert_same(resumed, whole)
    assert "\nloss      " in capsys.readouterr().out


@rows
def test_an_evaluation_is_the_mean_over_the_items(name: str, tmp_path: Path) -> None:
    """After a training that asked, and with batches of any size."""
    row = ROWS[name]
    trainer = trained(row, tmp_path, batch=2, micro_batches=4, label_names=["labels"])
    found = []
    for size in (8, 3):
        trainer.args.per_device_eval_batch_size = size
        found.append(trainer.evaluate(losses.samples())["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


# -- two processes -----------------------------------------------------------------------------------------------------

SHARDED = ["fsdp", "fsdp kept", "zero 3"]


@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["whole", *(pytest.param(name, marks=pytest.mark.slow) for name in SHARDED)])
def test_in_two_processes_too(engine: str, tmp_path: Path) -> None:
    """The loss of the second step shows the update by the first one."""
    if engine == "zero 3":
        pytest.importorskip("deepspeed")
    script = Path(losses_of_two.__file__)
    done = run(script, str(tmp_path), engine, folder=tmp_path, processes=2, timeout_s=360, environment=CPU)
    assert done.code == 0, done.out
    for name in losses_of_two.NAMES:
        whole = losses.losses(trained(ROWS[name], tmp_path, batch=8, micro_batches=1))
        for micro_batches in (1, 2):
            told = done.told[0][f"{engine}: {name}: {micro_batches}"]
            assert told == pytest.approx(whole, rel=1e-3), (name, micro_batches)
