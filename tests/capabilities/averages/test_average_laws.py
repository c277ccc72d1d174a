"""The laws of averages: what enters, that training does not notice, and that a resume continues to the bit."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Decision, EarlyStoppingCallback, Extension, StepFacts, TrainerCallback
from trainwright.capabilities.averages.saved import AVERAGES_NAME
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.training_state import load_plain
from trainwright.cli.verify import accepted
from trainwright.errors import ArgumentError, CheckpointError

from ..._support.engines import needs
from ..._support.two_processes import run as run_ranks
from ...contract import doubles
from ..guard import poisoned
from ..guard.test_step_guard import decide_on_the_device
from .average_runs import KINDS, ON_CPU, STEPS, average_of, make

Weights = dict[str, torch.Tensor]


class KeepsWeights(TrainerCallback):
    """Copies the weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, Weights] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.after[state.global_step] = {name: one.detach().clone() for name, one in named}


def by_definition(kind: Any, entries: list[Weights]) -> Weights:
    """Returns the average of entries in double precision, straight from its formula."""
    options = {"kind": kind} if isinstance(kind, str) else dict(kind)
    lists = {name: [entry[name].double() for entry in entries] for name in entries[0]}
    if options["kind"] != "ema":
        last = options.get("last", 5) if options["kind"] == "lawa" else len(entries)
        return {name: torch.stack(values[-last:]).mean(dim=0) for name, values in lists.items()}
    averages = {}
    for name, values in lists.items():
        average = values[0]
        for number, value in enumerate(values[1:], start=1):
            decay = options.get("decay", 0.999)
            if options.get("warmup", True):
                decay = min(decay, (1 + number) / (10 + number))
            average = decay * average + (1 - decay) * value
        averages[name] = average
    return averages


def steps_that_enter(kind: Any, left_out: tuple[int, ...] = ()) -> list[int]:
    options = {} if isinstance(kind, str) else dict(kind)
    start = options.get("start", 0)
    first = start if start >= 1 else start * STEPS
    every = options.get("every", 1)
    return [step for step in range(1, STEPS + 1) if step >= first and step % every == 0 and step not in left_out]


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-7)


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_what_its_formula_says(kind: str, tmp_path: Path) -> None:
    """Over optimizer steps, whatever the micro-batches of each; in fp32."""
    keeps = KeepsWeights()
    make(tmp_path, kind, callbacks=[keeps]).train()
    found = average_of(tmp_path / f"checkpoint-{STEPS}")
    entries = [keeps.after[step] for step in steps_that_enter(KINDS[kind])]
    assert_close(found, by_definition(KINDS[kind], entries))
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert Checkpoint(tmp_path / f"checkpoint-{STEPS}").find_problem() is None
    assert AVERAGES_NAME in Checkpoint(tmp_path / f"checkpoint-{STEPS}").manifest.files  # type: ignore[union-attr]


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_training_does_not_notice_and_a_resume_continues_to_the_bit(kind: str, tmp_path: Path) -> None:
    without = make(tmp_path / "without", kind, average=None)
    without.args.average = None
    without.train()
    whole = make(tmp_path / "whole", kind)
    whole.train()
    assert doubles.same(doubles.weights(whole), doubles.weights(without))
    make(tmp_path / "cut", kind, save_steps=1).train()
    for step in range(1, STEPS):
        again = make(tmp_path / f"from {step}", kind)
        again.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{step}"))
        assert doubles.same(doubles.weights(again), doubles.weights(whole)), step
        one, other = (
            load_plain(at / f"checkpoint-{STEPS}" / AVERAGES_NAME) for at in (tmp_path / "whole", again_dir(again))
        )
        assert one["num"] == other["num"]
        assert all(same(mine, theirs) for mine, theirs in zip(one["copies"], other["copies"], strict=True)), step


def again_dir(trainer: Any) -> Path:
    return Path(trainer.args.output_dir)


def test_a_run_that_a_signal_ends_continues_the_average(tmp_path: Path) -> None:
    class Signals(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    make(tmp_path / "whole", "exponential").train()
    with pytest.raises(SystemExit):
        make(tmp_path / "cut", "exponential", callbacks=[Signals()], save_steps=100).train()
    make(tmp_path / "cut", "exponential").train(resume_from_checkpoint=True)
    whole, cut = (average_of(tmp_path / name / f"checkpoint-{STEPS}") for name in ("whole", "cut"))
    assert same(whole, cut)


@pytest.mark.parametrize("kind", ["exponential", "mean", "mean of the last"])
def test_an_evaluation_of_the_average_is_that_of_a_model_with_it(kind: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, kind)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_average_loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    trainer.model.load_state_dict(average_of(tmp_path / f"checkpoint-{STEPS}"))
    assert trainer.evaluate()["eval_loss"] == logged[-1]["eval_average_loss"]


def test_several_evaluation_sets_are_evaluated_with_the_average_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, "exponential", metric_for_best_model="average_easy_loss")
    trainer.eval_dataset = {"easy": doubles.samples(8), "hard": doubles.samples(6)}
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry if name.endswith("_loss")}
    assert names == {
        "train_loss",
        *(f"eval{average}_{name}_loss" for average in ("", "_average") for name in ("easy", "hard")),
    }
    found = [
        entry["eval_average_easy_loss"] for entry in trainer.state.log_history if "eval_average_easy_loss" in entry
    ]
    assert trainer.state.best_metric == min(found)


def test_an_error_in_the_evaluation_of_the_average_leaves_the_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path, "exponential", save_strategy="no")
    keeps = KeepsWeights()
    trainer.add_callback(keeps)
    plain = trainer.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if "eval_average" in (*args, *kwargs.values()):
            raise ZeroDivisionError
        return plain(*args, **kwargs)

    trainer.evaluate = evaluate
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert same(dict(trainer.model.named_parameters()), keeps.after[2])


@pytest.mark.parametrize("metric", ["loss", "average_loss"])
def test_early_stopping_takes_the_metric_of_the_evaluation_that_gives_it(
    metric: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stops = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    trainer = make(tmp_path, "exponential", callbacks=[stops], metric_for_best_model=metric)
    trainer.train()
    assert trainer.state.global_step == 4, "the second evaluation is no improvement by 10"
    assert "did not give" not in caplog.text


class Refuses(Extension):
    """Refuses the updates of two steps."""

    name = "refuses"
    order = 50

    def decide(self, facts: StepFacts) -> Decision:
        return Decision.SKIP if facts.step in (2, STEPS) else Decision.APPLY


@pytest.mark.parametrize("kind", ["exponential", "with warm-up", "mean", "mean of the last"])
def test_a_refused_step_does_not_enter(kind: str, tmp_path: Path) -> None:
    keeps = KeepsWeights()
    trainer = make(tmp_path, kind, callbacks=[keeps])
    trainer.add_extension(Refuses())
    trainer.train()
    entries = [keeps.after[step] for step in steps_that_enter(KINDS[kind], left_out=(2, STEPS))]
    assert_close(average_of(tmp_path / f"checkpoint-{STEPS}"), by_definition(KINDS[kind], entries))


def guarded(folder: Path, kind: str, step: int, **parts: Any) -> Weights:
    poison = {(step - 1) * poisoned.BATCH + 1: poisoned.POISONS["nan"]}
    settings = {"average": KINDS[kind], "max_steps": STEPS, "save_strategy": "steps", "save_steps": STEPS}
    poisoned.trained(folder, poison=poison, settings=settings, **parts)
    return average_of(folder / f"checkpoint-{STEPS}")


@pytest.mark.parametrize("step", [1, 3, STEPS])
@pytest.mark.parametrize("kind", ["exponential", "with warm-up", "mean", "mean of the last"])
def test_a_step_that_a_guard_refuses_late_does_not_enter(
    kind: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where it is known only during the next step; the average is that of a guard that knows at once."""
    at_once = guarded(tmp_path / "host", kind, step)
    keeps = KeepsWeights()
    decide_on_the_device(monkeypatch)
    late = guarded(tmp_path / "device", kind, step, callbacks=[keeps])
    assert same(at_once, late)
    entries = [keeps.after[one] for one in steps_that_enter(KINDS[kind], left_out=(step,))]
    assert_close(late, by_definition(KINDS[kind], entries))


@pytest.mark.parametrize("kind", ["exponential", "mean of the last"])
def test_weights_in_bf16_are_averaged_in_fp32(kind: str, tmp_path: Path) -> None:
    keeps = KeepsWeights()
    trainer = make(tmp_path, kind, model=doubles.model().bfloat16(), callbacks=[keeps], train_dataset=halves())
    trainer.eval_dataset = halves()
    trainer.train()
    entries = [keeps.after[step] for step in steps_that_enter(KINDS[kind])]
    found = average_of(tmp_path / f"checkpoint-{STEPS}")
    assert_close(found, by_definition(KINDS[kind], entries))
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert same(dict(trainer.model.named_parameters()), keeps.after[STEPS]), "evaluations put the weights back"


def halves() -> list[dict[str, Any]]:
    return [{name: torch.as_tensor(value).bfloat16() for name, value in row.items()} for row in doubles.samples()]


def test_only_trained_weights_are_averaged_and_unfrozen_ones_join(tmp_path: Path) -> None:
    class Unfreezes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                kwargs["model"].body.requires_grad_(True)

    model = doubles.model()
    model.body.requires_grad_(False)
    keeps = KeepsWeights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(tmp_path, "mean", model=model, callbacks=[Unfreezes(), keeps])
    trainer.optimizer = optimizer
    trainer.train()
    assert set(load_plain(tmp_path / "checkpoint-3" / AVERAGES_NAME)["copies"][0]) == set(keeps.after[3])
    found = average_of(tmp_path / f"checkpoint-{STEPS}")
    head = {name: found[name] for name in ("head.weight", "head.bias")}
    entries = [{name: keeps.after[step][name] for name in head} for step in steps_that_enter("swa")]
    assert_close(head, by_definition("swa", entries))


def test_another_kind_begins_anew_and_smaller_number_of_entries_keeps_the_last(tmp_path: Path) -> None:
    keeps = KeepsWeights()
    make(tmp_path / "one", "mean of the last", callbacks=[keeps], average={"kind": "lawa", "last": 3}).train()
    start = str(tmp_path / "one" / "checkpoint-3")
    for average, steps in (("swa", (4, 5, 6)), ({"kind": "lawa", "last": 2}, (5, 6))):
        folder = tmp_path / str(average)[:4]
        make(folder, "mean", average=average).train(resume_from_checkpoint=start)
        entries = [keeps.after[step] for step in steps]
        assert_close(average_of(folder / f"checkpoint-{STEPS}"), by_definition("swa", entries))


def test_an_average_of_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "one", "mean").train()
    file = tmp_path / "one" / "checkpoint-3" / AVERAGES_NAME
    state = load_plain(file)
    state["copies"][0]["head.bias"] = torch.zeros(7)
    torch.save(state, file)
    accepted([file.parent])
    with pytest.raises(CheckpointError, match=r"head.bias in the shape \(7,\), and the model has \(1,\)"):
        make(tmp_path / "two", "mean").train(resume_from_checkpoint=str(file.parent))


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ("mean", "kind 'mean' is not one of ema, swa, lawa"),
        ({"decay": 0.9}, "kind None is not one of"),
        ({"kind": "ema", "decay": 1.5}, "decay is 1.5; it must be at least 0 and below 1"),
        ({"kind": "ema", "dekay": 0.5}, "ema has no option 'dekay'. Did you mean decay?"),
        ({"kind": "swa", "last": 3}, "swa has no option 'last'"),
        ({"kind": "lawa", "last": 0}, "last is 0"),
        ({"kind": "ema", "every": 1.5}, "every is 1.5"),
        ({"kind": "ema", "start": 1.5}, "start is 1.5"),
        ({"kind": "ema", "memory": "gpu"}, "memory is 'gpu'; it must be device or host"),
    ],
)
def test_a_wrong_average_is_refused_with_the_allowed_values(average: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        doubles.arguments(tmp_path, average=average)
    assert message in str(caught.value)


def test_a_share_of_an_unknown_number_of_steps_is_refused(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from doubles.samples()

    settings = {"max_steps": -1, "average": {"kind": "swa", "start": 0.5}, "lr_scheduler_type": "constant"}
    trainer = doubles.trainer(tmp_path, settings=settings, train_dataset=Stream())
    with pytest.raises(ArgumentError, match=r"start=0.5 is a share of all steps"):
        trainer.train()


# -- several processes ------------------------------------------------------------------------------------------------


Alone = Callable[[str], tuple[Weights, list[float]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the average of a kind in one process, and the losses of its evaluations; each is trained once."""

    @functools.cache
    def train(kind: str) -> tuple[Weights, list[float]]:
        folder = tmp_path_factory.mktemp("alone")
        trainer = make(folder, kind)
        trainer.train()
        losses = [entry["eval_average_loss"] for entry in trainer.state.log_history if "eval_average_loss" in entry]
        return average_of(folder / f"checkpoint-{STEPS}"), losses

    return train


def assert_as_alone(told: dict[str, Any], alone: Alone) -> None:
    for name, found in told.items():
        average, losses = alone(name.partition(": ")[2])
        assert found["average"] == found["resumed"], name
        assert found["metrics"] == pytest.approx(losses, rel=1e-5), name
        for weight, values in average.items():
            assert found["average"][weight] == pytest.approx(values.flatten().tolist(), rel=1e-4, abs=1e-6), name


SCRIPT = Path(__file__).with_name("average_of_two.py")


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backends", "num_runs"),
    [
        (("ddp", "fsdp"), 2),
        # One kind shows how parts are averaged and joined; the arithmetic of the others is tried in one process.
        pytest.param(("fsdp of all kinds",), len(KINDS), marks=pytest.mark.slow),
    ],
    ids=["one kind", "all kinds"],
)
def test_two_processes_have_average_of_one_and_continue_it_to_the_bit(
    backends: tuple[str, ...], num_runs: int, tmp_path: Path, alone: Alone
) -> None:
    told = run_ranks(SCRIPT, str(tmp_path), *backends, folder=tmp_path, timeout_s=250).told[0]
    assert len(told) == num_runs
    assert_as_alone(told, alone)


@needs("deepspeed")
@pytest.mark.process
@pytest.mark.slow  # DeepSpeed
@pytest.mark.timeout(300)
def test_zero_has_the_average_of_one_where_it_holds_whole_weights(tmp_path: Path, alone: Alone) -> None:
    how: dict[str, Any] = {"folder": tmp_path, "timeout_s": 250, "environment": ON_CPU}
    told = run_ranks(SCRIPT, str(tmp_path), "zero 1", "zero 2", **how).told[0]
    assert list(told) == ["zero 1: exponential", "zero 2: exponential"]
    assert_as_alone(told, alone)
    reasons = {"zero 3": "ZeRO stage 3 has them in partitions", "zero 1 in bf16": "in its optimizer"}
    told = run_ranks(SCRIPT, str(tmp_path), *(f"refused {name}" for name in reasons), processes=1, **how).told[0]
    assert [name for name, reason in reasons.items() if reason not in told[name]] == []
