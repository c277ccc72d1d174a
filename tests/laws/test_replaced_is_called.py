"""What a user or a library replaces is what runs: as often as in the original, and with the same weights at the end.

A row of `REPLACED` is something that people replace. Each is replaced before `train()`, by a callback in mid-run, or
between two runs of one trainer; both libraries train the same small model.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainwright

from ..contract import doubles

NUM_STEPS = 5
REPLACED_AFTER = 2
LIBRARIES = ("transformers", "trainwright")


@dataclass
class Side:
    """One library's trainer, its calls, and what undoes a replacement when the run is over."""

    trainer: Any
    calls: Counter[str]
    undo: ExitStack

    def replace(self, owner: Any, name: str, counted: str = "calls") -> None:
        """Replaces a function by one that counts and calls it, as a wrapper of a user does."""
        original = getattr(owner, name)
        had_own = name in vars(owner)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls[counted] += 1
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)
        self.undo.callback(lambda: setattr(owner, name, original) if had_own else delattr(owner, name))


Replacement = Callable[[Side], None]


def on(owner: Callable[[Side], Any], *names: str) -> Replacement:
    def replace(side: Side) -> None:
        for name in names:
            side.replace(owner(side), name, name)

    return replace


class CountsFunctions(TorchFunctionMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("backward", "vector_norm", "mse_loss"):
            self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class CountsOperations(TorchDispatchMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in (
            "mse_loss_backward",
            "_foreach_norm",
            "linalg_vector_norm",
            "_fused_adamw_",
        ):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def enter(mode: Callable[[Counter[str]], Any]) -> Replacement:
    return lambda side: side.undo.enter_context(mode(side.calls))


def hooked(register: Callable[[Side, Callable[..., None]], Any]) -> Replacement:
    def replace(side: Side) -> None:
        def hook(*args: Any) -> None:
            side.calls["hook"] += 1

        side.undo.callback(register(side, hook).remove)

    return replace


def optimizer_of(side: Side) -> Any:
    return side.trainer.create_optimizer() if side.trainer.optimizer is None else side.trainer.optimizer


def torch_optimizer_of(side: Side) -> Any:
    """The optimizer inside accelerate's wrapper, which only the original has."""
    optimizer = optimizer_of(side)
    return getattr(optimizer, "optimizer", optimizer)


def weight(side: Side) -> torch.Tensor:
    return side.trainer.model.head.weight


def clip_each_value(side: Side) -> None:
    """What adaptive clipping does: another rule under torch's name."""

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        side.calls["calls"] += 1
        parameters = [p for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad.clamp_(-0.01, 0.01)
        return torch.stack([p.grad.norm() for p in parameters]).norm()

    before = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    side.undo.callback(lambda: setattr(torch.nn.utils, "clip_grad_norm_", before))


def backward_that_takes_the_loss_alone(side: Side) -> None:
    original = torch.Tensor.backward

    def backward(self: torch.Tensor) -> None:
        side.calls["calls"] += 1
        original(self)

    torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
    side.undo.callback(lambda: setattr(torch.Tensor, "backward", original))


def accelerator_backward_that_takes_the_loss_alone(side: Side) -> None:
    def backward(loss: torch.Tensor) -> None:
        side.calls["calls"] += 1
        (loss * 2).backward()

    side.trainer.accelerator.backward = backward


def another_optimizer(side: Side) -> None:
    side.trainer.optimizer = torch.optim.SGD(side.trainer.model.parameters(), lr=0.1)
    on(lambda side: side.trainer.optimizer, "step")(side)


def maximize(side: Side) -> None:
    side.calls["calls"] += 1
    for group in optimizer_of(side).param_groups:
        group["maximize"] = True


def step_count_in_double_precision(side: Side) -> None:
    side.calls["calls"] += 1
    for state in torch_optimizer_of(side).state.values():
        state["step"] = state["step"].double()


def new_head(side: Side) -> None:
    """A parameter that comes in, with gradients from then on."""
    side.calls["calls"] += 1
    torch.manual_seed(5)
    head = nn.Linear(8, 1)
    side.trainer.model.head = head
    torch_optimizer_of(side).param_groups[0]["params"].extend(head.parameters())


class OtherSchedule(torch.optim.lr_scheduler.ConstantLR):
    pass


def another_schedule(side: Side) -> None:
    side.trainer.lr_scheduler = OtherSchedule(torch_optimizer_of(side), factor=0.5)
    on(lambda side: side.trainer.lr_scheduler, "step")(side)


BEFORE = "before the run"
MID = "in mid-run"
BETWEEN = "between two runs"
ALWAYS = (BEFORE, MID, BETWEEN)
REPLACED: dict[str, tuple[Replacement, tuple[str, ...]]] = {
    "accelerator.backward": (on(lambda side: side.trainer.accelerator, "backward"), ALWAYS),
    "accelerator.backward, of the loss alone": (accelerator_backward_that_takes_the_loss_alone, ALWAYS),
    "accelerator.clip_grad_norm_": (on(lambda side: side.trainer.accelerator, "clip_grad_norm_"), ALWAYS),
    "Accelerator.backward": (on(lambda side: Accelerator, "backward"), ALWAYS),
    "Accelerator.clip_grad_norm_": (on(lambda side: Accelerator, "clip_grad_norm_"), ALWAYS),
    "torch.nn.utils.clip_grad_norm_": (on(lambda side: torch.nn.utils, "clip_grad_norm_"), ALWAYS),
    "another rule of clipping": (clip_each_value, ALWAYS),
    "Tensor.backward": (on(lambda side: torch.Tensor, "backward"), ALWAYS),
    "Tensor.backward, of the loss alone": (backward_that_takes_the_loss_alone, ALWAYS),
    "torch.autograd.backward": (on(lambda side: torch.autograd, "backward"), ALWAYS),
    "AdamW.step": (on(lambda side: torch.optim.AdamW, "step"), (BEFORE,)),  # a schedule keeps the one it has met
    "optimizer.step": (on(optimizer_of, "step"), (MID,)),
    "lr_scheduler.step": (on(lambda side: side.trainer.lr_scheduler, "step"), (MID,)),
    "model.zero_grad": (on(lambda side: side.trainer.model, "zero_grad"), ALWAYS),
    "Module.zero_grad": (on(lambda side: nn.Module, "zero_grad"), ALWAYS),
    "trainer.optimizer": (another_optimizer, (MID,)),
    "trainer.lr_scheduler": (another_schedule, (MID,)),
    "maximize": (maximize, (BEFORE, MID)),
    "a step count in double precision": (step_count_in_double_precision, (MID,)),
    "a new head": (new_head, (MID,)),
    "trainer.training_step": (on(lambda side: side.trainer, "training_step"), ALWAYS),
    "trainer.compute_loss": (on(lambda side: side.trainer, "compute_loss"), ALWAYS),
    "trainer.get_batch_samples": (on(lambda side: side.trainer, "get_batch_samples"), ALWAYS),
    "trainer._clip_grad_norm": (on(lambda side: side.trainer, "_clip_grad_norm"), ALWAYS),
    "model.forward": (on(lambda side: side.trainer.model, "forward"), (MID, BETWEEN)),
    "functional.mse_loss": (on(lambda side: nn.functional, "mse_loss"), ALWAYS),
    "a hook before the update": (
        hooked(lambda side, hook: torch_optimizer_of(side).register_step_pre_hook(hook)),
        (BEFORE, MID),
    ),
    "a hook after the update": (
        hooked(lambda side, hook: torch_optimizer_of(side).register_step_post_hook(hook)),
        (BEFORE, MID),
    ),
    "a hook before each update": (hooked(lambda side, hook: register_optimizer_step_pre_hook(hook)), ALWAYS),
    "a hook after each update": (hooked(lambda side, hook: register_optimizer_step_post_hook(hook)), ALWAYS),
    "a hook on a module": (hooked(lambda side, hook: side.trainer.model.head.register_forward_hook(hook)), ALWAYS),
    "a hook on a module's gradients": (
        hooked(lambda side, hook: side.trainer.model.head.register_full_backward_hook(hook)),
        ALWAYS,
    ),
    "a hook on a gradient": (hooked(lambda side, hook: weight(side).register_hook(hook)), ALWAYS),
    "a hook on a gradient that is added": (
        hooked(lambda side, hook: weight(side).register_post_accumulate_grad_hook(hook)),
        ALWAYS,
    ),
    "a TorchFunctionMode": (enter(CountsFunctions), (BEFORE, MID)),
    "a TorchDispatchMode": (enter(CountsOperations), (BEFORE, MID)),
}
CASES = [(name, when) for name, (_, moments) in REPLACED.items() for when in moments]


@contextmanager
def side_of(library: str, folder: Path, **settings: Any) -> Iterator[Side]:
    package = importlib.import_module(library)
    args = package.TrainingArguments(
        output_dir=str(folder / library),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=4,
        max_steps=NUM_STEPS,
        logging_steps=1,
        learning_rate=0.05,
        max_grad_norm=0.1,
        **settings,
    )
    trainer = package.Trainer(model=doubles.model(), args=args, train_dataset=doubles.samples(40))
    with ExitStack() as undo:
        yield Side(trainer, Counter(), undo)


def train(side: Side, replace: Replacement, when: str) -> None:
    if when == BEFORE:
        replace(side)
    elif when == BETWEEN:
        side.trainer.train()
        replace(side)
    else:
        side.trainer.add_callback(MidRun(lambda: replace(side)))
    side.trainer.train()


class MidRun(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, replace: Callable[[], None]) -> None:
        self.replace = replace

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == REPLACED_AFTER:
            self.replace()


@pytest.mark.framework
@pytest.mark.parametrize(("name", "when"), CASES, ids=[f"{name}, {when}" for name, when in CASES])
def test_what_is_replaced_is_called(name: str, when: str, tmp_path: Path) -> None:
    replace, _ = REPLACED[name]
    found = {}
    for library in LIBRARIES:
        with side_of(library, tmp_path) as side:
            train(side, replace, when)
        losses = [entry["loss"] for entry in side.trainer.state.log_history if "loss" in entry]
        norms = [float(entry["grad_norm"]) for entry in side.trainer.state.log_history if "grad_norm" in entry]
        found[library] = dict(side.calls), losses, norms, doubles.weights(side.trainer)
    theirs = found["transformers"]
    ours = found["trainwright"]
    assert theirs[0], "the original does not call it"
    assert ours[0] == theirs[0]
    assert ours[1:3] == theirs[1:3]
    assert doubles.same(ours[3], theirs[3])


def test_step_that_was_put_on_optimizer_before_the_first_run_is_called(tmp_path: Path) -> None:
    """The original fails there: torch's schedules wrap methods, and this is a plain function."""
    with side_of("trainwright", tmp_path) as side:
        for _ in range(2):
            train(side, on(optimizer_of, "step"), BEFORE)
    assert side.calls["step"] == 3 * NUM_STEPS  # the second run calls the wrapper around the first one's


@pytest.mark.framework
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_is_not_that_of_the_model(
    dtype: torch.dtype, accumulation: int, tmp_path: Path
) -> None:
    weights = {}
    for library in LIBRARIES:
        with side_of(library, tmp_path, gradient_accumulation_steps=accumulation, save_steps=2) as side:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                side.trainer.train()
            finally:
                torch.set_default_dtype(before)
        weights[library] = doubles.weights(side.trainer)
        assert all(torch.isfinite(value).all() for value in weights[library].values())
    assert doubles.same(*weights.values())


def test_nothing_of_a_replacement_is_left_after_it(tmp_path: Path) -> None:
    """The table undoes what it does, or one row would be seen in another."""
    with side_of("trainwright", tmp_path) as side:
        for replace, moments in REPLACED.values():
            if BETWEEN in moments:
                replace(side)
    with side_of("trainwright", tmp_path) as after:
        after.trainer.train()
    assert not side.calls
    assert trainwright.Trainer.__module__ == "trainwright.trainer"
