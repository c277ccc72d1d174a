"""Loops of a user's own, `steps()` and `fit_step()`: the run that `train()` makes, and an end wherever one leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback
from trainwright.checkpoint.manifest import find_problem
from trainwright.errors import ArgumentError, NestedCallError, StepOrderError

from .._support.small import data, differing, make_trainer, weights, without_clock
from .._support.two_processes import run
from .test_windows_and_items import Holds

SETTINGS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}


def train_step(trainer: Any, step: Any) -> Any:
    for batch in step.batches:
        step.backward(trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items))
    return step.update()


def drive(trainer: Any, body: Callable[[Any], object]) -> None:
    for step in trainer.steps():
        body(step)


def by_steps(trainer: Any, resume: Any = None) -> Any:
    steps = trainer.steps(resume_from_checkpoint=resume)
    results = [train_step(trainer, step) for step in steps]
    assert results[-1].step == trainer.state.global_step
    return steps.output


def by_fit_step(trainer: Any, resume: Any = None) -> Any:
    results = []
    while (result := trainer.fit_step(resume_from_checkpoint=resume)) is not None:
        results.append(result)
    assert trainer.fit_step() is None  # a run that has ended does not begin again
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [float(result.loss) for result in results] == pytest.approx(losses[-len(results) :])
    assert all(float(result.grad_norm) > 0 and result.learning_rate is not None for result in results)
    return None


def by_train(trainer: Any, resume: Any = None) -> Any:
    return trainer.train(resume_from_checkpoint=resume)


class Hears(TrainerCallback):
    """Keeps the events of a run in their order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.errors: list[BaseException] = []

    def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.errors.append(kwargs["exception"])


def _heard(event: str) -> Callable[..., None]:
    def listen(self: Hears, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(event)

    return listen


for _name in (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
):
    setattr(Hears, _name, _heard(_name))


def trained(how: Any, folder: Path, accumulation: int, resume: Any = None) -> tuple[Any, list[str], Any]:
    hears = Hears()
    trainer = make_trainer(
        folder, callbacks=[hears], eval_dataset=data.vectors(8), gradient_accumulation_steps=accumulation, **SETTINGS
    )
    output = how(trainer, resume)
    return trainer, hears.events, output


@pytest.fixture(scope="module", params=[1, 4])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(f"reference{request.param}")
    return request.param, folder, *trained(by_train, folder, request.param)


@pytest.mark.parametrize("resumes", [False, True], ids=["whole", "resumed"])
@pytest.mark.parametrize("how", [by_steps, by_fit_step])
def test_loop_of_ones_own_is_the_run_of_train_bit_for_bit(
    how: Any, resumes: bool, reference: Any, tmp_path: Path
) -> None:
    accumulation, folder, theirs, events, metrics = reference
    trainer, heard, output = trained(how, tmp_path, accumulation, str(folder / "checkpoint-2") if resumes else None)
    assert not differing(weights(trainer.model), weights(theirs.model))
    mine, others = (without_clock(one.state.log_history) for one in (trainer, theirs))
    assert mine[:-1] == others[:-1]
    assert resumes or mine == others  # the last entry has the mean loss since the resume
    assert heard == (events if not resumes else [events[0], *heard[1:]])
    assert heard.count("on_step_end") == (2 if resumes else 4)
    assert find_problem(tmp_path / "checkpoint-4") is None
    if output is not None and not resumes:
        assert output.training_loss == metrics.training_loss


# -- the end of a loop that is left -----------------------------------------------------------------------------------


@pytest.mark.process
def test_a_loop_that_is_left_ends_workers_writes_and_handlers(tmp_path: Path) -> None:
    hears = Hears()
    before = signal.getsignal(signal.SIGTERM)
    others = multiprocessing.active_children()  # of other tests
    trainer = make_trainer(tmp_path, callbacks=[hears], save_strategy="steps", save_steps=1, dataloader_num_workers=1)
    for step in trainer.steps():
        train_step(trainer, step)
        workers = [one for one in multiprocessing.active_children() if one not in others]
        assert workers
        assert signal.getsignal(signal.SIGTERM) != before
        break
    for worker in workers:  # torch leaves one that does not end at once to a signal, and does not wait for it
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    assert signal.getsignal(signal.SIGTERM) == before
    assert (hears.events[-1], hears.errors) == ("on_train_end", [])
    assert find_problem(tmp_path / "checkpoint-1") is None
    assert not trainer.is_in_train
    with pytest.raises(StepOrderError, match="has ended"):
        step.update()
    assert trainer.train(resume_from_checkpoint=True).global_step == 14


def test_an_error_in_a_loop_ends_the_run_which_may_be_saved(tmp_path: Path) -> None:
    hears = Hears()
    trainer = make_trainer(tmp_path, callbacks=[hears], save_on_exception=True, save_strategy="no")

    def body(step: Any) -> None:
        if step.number == 3:
            raise ZeroDivisionError
        train_step(trainer, step)

    with pytest.raises(ZeroDivisionError):
        drive(trainer, body)
    assert not trainer.is_in_train
    assert (hears.events[-1], hears.errors) == ("on_train_end", [])  # it looks like `break` to the run
    assert not (tmp_path / "checkpoint-2").exists()
    with pytest.raises(ZeroDivisionError), trainer.steps() as steps:
        list(map(body, steps))
    assert [type(error) for error in hears.errors] == [ZeroDivisionError]
    assert (tmp_path / "checkpoint-2").is_dir()
    assert (tmp_path / "incidents" / "step-000003-error").is_dir()


def test_an_error_of_the_trainers_own_ends_the_run_as_in_train(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise LookupError

    hears = Hears()
    trainer = make_trainer(tmp_path, callbacks=[hears, Fails()])
    with pytest.raises(LookupError):
        by_steps(trainer)
    assert [type(error) for error in hears.errors] == [LookupError]


def test_a_signal_ends_the_loop_after_the_step_which_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=500)

    def body(step: Any) -> None:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(trainer, step)

    with pytest.raises(SystemExit) as error:
        drive(trainer, body)
    assert error.value.code == 128 + signal.SIGTERM
    assert find_problem(tmp_path / "checkpoint-2") is None


@pytest.mark.parametrize("how", [by_steps, by_fit_step])
def test_control_ends_the_run_in_order(how: Any, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 1

    trainer = make_trainer(tmp_path, callbacks=[Stops()], gradient_accumulation_steps=3)
    if how is by_steps:
        steps = trainer.steps()
        assert [train_step(trainer, step) is None for step in steps] == [False, True]
        assert steps.output.global_step == 1
    else:
        assert trainer.fit_step().step == 1
        assert trainer.fit_step() is None
    assert "train_runtime" in trainer.state.log_history[-1]


def test_a_bad_step_is_skipped(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, on_nonfinite="skip", max_steps=3)
    for step in trainer.steps():
        before = weights(trainer.model)
        for batch in step.batches:
            loss = trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items)
            step.backward(loss * float("nan") if step.number == 2 else loss)
        step.update()
        assert (not differing(before, weights(trainer.model))) == (step.number == 2)
    assert trainer.state.log_history[1]["guard/skipped_steps"] == 1


# -- the loss of a loop of one's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_loss_of_ones_own_says_whether_it_is_scaled(is_scaled: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2}
    theirs = make_trainer(tmp_path / "theirs", **settings)
    theirs.train()
    trainer = make_trainer(tmp_path / "mine", **settings)
    for step in trainer.steps():
        for batch in step.batches:
            loss = step.model(**batch)["loss"]
            step.backward(loss / 2 if is_scaled else loss, is_scaled=is_scaled)
        step.update()
    assert not differing(weights(trainer.model), weights(theirs.model))


# -- misuse ------------------------------------------------------------------------------------------------------------


def updates_twice(trainer: Any, step: Any) -> None:
    train_step(trainer, step)
    step.update()


def differentiates_late(trainer: Any, step: Any) -> None:
    train_step(trainer, step)
    step.backward(torch.zeros(()))


def leaves_batches_out(trainer: Any, step: Any) -> None:
    next(iter(step.batches))
    step.update()


def forgets_backward(trainer: Any, step: Any) -> None:
    for _ in step.batches:
        pass


def reads_batches_again(trainer: Any, step: Any) -> None:
    train_step(trainer, step)
    step.batches  # noqa: B018


def differentiates_outside(trainer: Any, step: Any) -> None:
    step.backward(torch.zeros(()))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (updates_twice, "update() was called twice"),
        (differentiates_late, "after step.update()"),
        (leaves_batches_out, "before all micro-batches"),
        (forgets_backward, "backward(loss) was not called"),
        (reads_batches_again, "iterated already"),
        (differentiates_outside, "outside of the loop"),
        (lambda trainer, step: None, "before step.update() of step 1"),
        (lambda trainer, step: trainer.train(), "train() was called while this trainer is training"),
        (lambda trainer, step: trainer.steps(), "steps() was called while this trainer is training"),
        (lambda trainer, step: trainer.fit_step(), "fit_step() was called while this trainer is training"),
    ],
)
def test_misuse_is_an_error_that_ends_the_run(body: Any, message: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises((StepOrderError, NestedCallError)) as error:
        drive(trainer, lambda step: body(trainer, step))
    assert message in str(error.value)
    assert not trainer.is_in_train


def test_steps_inside_of_train_is_refused(tmp_path: Path) -> None:
    class Drives(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.steps()

    trainer = make_trainer(tmp_path, callbacks=[Drives()])
    with pytest.raises(NestedCallError, match=r"steps\(\) was called"):
        trainer.train()


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class OwnEpoch(Trainer):
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)


def test_what_a_loop_of_ones_own_would_leave_out_is_refused(tmp_path: Path) -> None:
    for cls, settings, message in (
        (OwnStep, {}, "OwnStep.training_step"),
        (OwnEpoch, {}, "OwnEpoch._run_epoch"),
        (Trainer, {"auto_find_batch_size": True}, "auto_find_batch_size"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_trainer(tmp_path, cls=cls, **settings).steps()
    with pytest.raises(ArgumentError, match="_run_epoch"):
        make_trainer(tmp_path, cls=OwnEpoch).fit_step()
    trainer = make_trainer(tmp_path, cls=OwnStep, max_steps=1, auto_find_batch_size=True)
    assert (trainer.fit_step().step, trainer.fit_step()) == (1, None)


# -- several processes -------------------------------------------------------------------------------------------------

TOGETHER = """
import os
import sys
from pathlib import Path
import torch
from tests._support.small import differing, make_trainer, weights
from tests._support.two_processes import tell
from tests.loop.test_driven import by_steps, by_train
from tests.loop.test_windows_and_items import Holds

folder, found = Path(sys.argv[1]), []
settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "ddp_backend": "gloo", "use_cpu": True,
            "save_strategy": "steps", "save_steps": 2}
for how in (by_train, by_steps):
    trainer = make_trainer(folder / how.__name__, **settings)
    trainer.checkpoint_items["rank"] = Holds(torch.tensor([int(os.environ["RANK"])]))
    engine = trainer._trainwright.services.engine
    syncs, accumulate = [], engine.accumulate
    engine.accumulate = lambda model, sync: (syncs.append(sync), accumulate(model, sync=sync))[1]
    how(trainer)
    found.append(weights(trainer.model))
resumed = make_trainer(folder / "by_steps", **settings)
resumed.checkpoint_items["rank"] = item = Holds(None)
by_steps(resumed, str(folder / "by_steps" / "checkpoint-2"))
tell(same=not differing(*found), syncs=syncs, resumed=not differing(weights(resumed.model), found[0]),
     item=item.value.tolist(), files=sorted(path.name for path in folder.glob("by_steps/checkpoint-2/*items*")))
"""


@pytest.mark.process
def test_two_processes_in_a_custom_loop_equal_train_resumed_too(tmp_path: Path) -> None:
    done = run(TOGETHER, str(tmp_path), folder=tmp_path, timeout_s=110)
    assert [(told["same"], told["resumed"], told["item"]) for told in done.told] == [
        (True, True, [0]),
        (True, True, [1]),
    ]
    assert done.told[0]["syncs"] == [False, True] * 3
    assert done.told[0]["files"] == ["checkpoint_items_0.pt", "checkpoint_items_1.pt"]
    one = make_trainer(tmp_path / "by_steps", max_steps=2)
    one.checkpoint_items["rank"] = item = Holds(None)
    one.train(resume_from_checkpoint=str(tmp_path / "by_steps" / "checkpoint-2"))
    assert item.value.tolist() == [0]  # a process alone takes those of the first
