"""Whether the user's own loss is a mean, or was divided by the number of items: found by computing it once more.

Before the first micro-batch of a window for which the answer matters, the loss is computed with twice the number of
items, without gradients. Nothing else of it stays: random states, buffers, recorded numbers, logs, and what the trainer
and the model hold are put back. The loss of the micro-batch itself is what it is compared with. In several processes,
over which a loss may be multiplied, and in loops over `steps()`, where the loss need not come from `compute_loss`, that
is computed the same way.

The answer replaces the rule of the run (`support/loss_normalization.py`), and goes into the journal and into
checkpoints, so that a resumed run does not compute it again. It is not looked for where it makes no difference: in one
process whose windows have one micro-batch.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from types import CodeType
from typing import Any, Protocol

import torch

from trainwright._types import Batch, JSONObject, StateDict
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.engine.base import Engine
from trainwright.errors import ModelError
from trainwright.journal.record import live_journal
from trainwright.loop.extension import Extension, Run
from trainwright.support.loss_normalization import LossFinding, LossOutput, LossScaling, compare_losses
from trainwright.support.model_modes import ModuleModes
from trainwright.support.unchanged import unchanged_objects

logger = logging.getLogger(__name__)

MOST_TRIES = 3  # micro-batches with losses that are not finite until it is given up
# Attributes of a trainer that a loss does not change, or whose changes are no business of ours.
LEFT_ALONE = frozenset({"args", "eval_dataset", "lr_scheduler", "model_wrapped", "optimizer", "train_dataset"})

ComputeLoss = Callable[[Any, Batch, Any], Any]
Losses = tuple[float, float]  # with the number of items, and with twice that number


class AskingRun(Run, Protocol):
    """A run whose rule for losses may be replaced."""

    losses: LossScaling
    forward: Callable[[Any, Batch], Any]
    outputs: Any


class LossHooks(Protocol):
    """What a loss may change: the trainer, and what it holds."""

    model: Any
    compute_loss_func: Any
    callback_handler: Any


class LossQuestion(Extension):
    """Settles the open rule of a run.

    Args:
        run: the run, whose `loss_rule` is open.
        hooks: the trainer, whose `compute_loss` is called.
        engine: engine of the run.
        functions: the user's functions that make the loss; a checkpoint's answer counts only for the same ones.
        subject: the names of these functions, for messages.
        weighting: `loss_weighting` of the user.
        factor: number of micro-batches of a step in all processes.
        folder: output directory of the run, for its journal.
        show: shows a line to the user.
    """

    name = "loss_question"

    def __init__(
        self,
        run: Any,
        hooks: Any,
        engine: Engine,
        *,
        functions: Iterable[object],
        subject: str,
        weighting: str | None,
        factor: int,
        folder: str,
        show: Callable[[str], None],
    ) -> None:
        self._run: AskingRun = run
        self._hooks: LossHooks | None = hooks
        self._engine = engine
        self._functions = [inspect.unwrap(getattr(one, "__func__", one)) for one in functions if callable(one)]
        self._loss_code = hash_functions(functions)
        self._subject = subject
        self._weighting = weighting
        self._factor = factor
        self._folder = folder
        self._show = show
        self._tries_left = MOST_TRIES
        self._twice: _Answer | None = None  # for the micro-batch whose own loss comes next
        self.finding: LossFinding | None = None
        self._losses: Losses | None = None

    # -- the answer of a checkpoint ------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns the answer for a checkpoint, with the code that it is about."""
        if self.finding is None:
            return {}
        return {"finding": self.finding.value, "losses": list(self._losses or ()), "code": self._loss_code}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes over the answer, unless the loss is computed by other code now."""
        if state.get("code") == self._loss_code and len(state.get("losses", ())) == 2:
            self._losses = float(state["losses"][0]), float(state["losses"][1])
            self._settle(LossFinding(state["finding"]))

    def begin(self, run: Run) -> None:
        """Opens the question if no checkpoint has answered it."""
        if self.finding is None:
            self._run.losses.question = self

    def facts(self) -> dict[str, Any]:
        """Returns the answer that was resumed, for the journal."""
        return {} if self.finding is None else {"loss": self._about()}

    def close(self) -> None:
        """Releases the run and the trainer."""
        self._run.losses.question = None
        self._hooks = None
        self._functions = []

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(
        self,
        compute_loss: ComputeLoss,
        model: Any,
        inputs: Batch,
        num_items: torch.Tensor | int | None,
        *,
        compares: bool = True,
    ) -> None:
        """Computes the loss with twice the number of items, if the answer matters for the current window.

        Args:
            compute_loss: takes the model, a micro-batch and the number of items.
            model: as the engine wrapped it.
            inputs: the micro-batch on the device; unchanged.
            num_items: label items of the window.
            compares: the loss of the micro-batch follows, in `compare`.
        """
        self._twice = None
        progress = self._run.progress
        is_alone = self._engine.num_batch_parts == self._engine.num_replicas == 1
        is_one_batch = len(progress.window.current.batches) == progress.window.num_parts == 1
        if num_items is None or (is_alone and is_one_batch):
            return
        if self._has_own_optimizer():
            # Computing the loss trains another model, such as the discriminator of a GAN: once is right.
            alone = _Answer(error=ModelError("the trainer has an optimizer of its own beside the run's"))
            self._judge(alone, alone, num_items)
            return
        compute = partial(compute_loss, model)
        twice = self._compute(compute, inputs, num_items * 2)
        if compares and is_alone:
            self._twice = twice
        else:
            self._judge(self._compute(compute, inputs, num_items), twice, num_items)

    def _has_own_optimizer(self) -> bool:
        hooks = self._hooks
        held = [] if hooks is None else [v for k, v in vars(hooks).items() if k != "optimizer"]
        return any(isinstance(one, torch.optim.Optimizer) for one in held)

    def compare(self, loss: torch.Tensor | LossOutput, num_items: torch.Tensor | int | None) -> None:
        """Compares the loss of the micro-batch with the one of `ask`."""
        twice = self._twice
        if twice is None:
            return
        self._twice = None
        self._judge(_Answer.from_result(loss, twice.auxiliary), twice, num_items)

    def _compute(self, compute: Callable[[Batch, Any], Any], inputs: Batch, num_items: Any) -> _Answer:
        """Returns the loss for a number of items, or the error that came."""
        try:
            with torch.no_grad():
                return self._computed(compute, inputs, num_items)
        except Exception as error:
            if self._engine.is_out_of_memory(error):
                raise
            if self._engine.num_replicas > 1 or not isinstance(error, RuntimeError):
                return _Answer(error=error)
        try:  # a loss may need gradients of its own
            return self._computed(compute, inputs, num_items)
        except Exception as error:
            if self._engine.is_out_of_memory(error):
                raise
            return _Answer(error=error)

    def _computed(self, compute: Callable[[Batch, Any], Any], inputs: Batch, num_items: Any) -> _Answer:
        seen: list[Any] = []
        with self._leaving_no_trace(seen):
            given = map_tensors(torch.Tensor.clone, inputs)
            loss = compute(given, num_items)
            rule = self._run.losses.rule
            assert rule is not None
            auxiliary = rule.auxiliary(seen[-1]) if seen else None
            share = self._run.progress.window.share
            return _Answer.from_result(loss, 0.0 if auxiliary is None else share * float(auxiliary))

    @contextmanager
    def _leaving_no_trace(self, seen: list[Any]) -> Iterator[None]:
        """Undoes whatever a loss does to the run, the trainer and the model; the outputs of the model are `seen`."""
        run = self._run
        hooks = self._hooks
        assert hooks is not None
        progress = run.progress
        state = progress.state
        num_logs = len(state.log_history)
        before = run.forward, run.outputs
        forward = copy(run.forward)
        modes = ModuleModes(hooks.model)

        def forward_once(model: Any, inputs: Batch) -> Any:
            seen.append(forward(model, inputs))
            return seen[-1]

        with ExitStack() as stack:
            stack.enter_context(unchanged_random_states())
            stack.enter_context(progress.recording_apart(self._engine.device))
            stack.enter_context(_without_events(hooks))
            stack.enter_context(unchanged_objects(hooks, state, progress.control, *self._functions, without=LEFT_ALONE))
            run.forward = forward_once
            try:
                yield
            finally:
                run.forward, run.outputs = before
                del state.log_history[num_logs:]
                modes.restore()
                # Casts that were made without gradients must not serve a pass with gradients.
                torch.clear_autocast_cache()

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _judge(self, once: _Answer, twice: _Answer, num_items: Any) -> None:
        """Settles the rule of the run; all processes come to the same answer."""
        failed = once.error or twice.error
        rounding = max(once.rounding, twice.rounding)
        numbers = torch.tensor(
            [once.value, twice.value, float(failed is not None), float(once.is_said), rounding], dtype=torch.float64
        )
        if self._engine.num_replicas > 1:
            device = self._engine.device
            shared = numbers.float().to(device)
            numbers = (self._engine.sum(shared) / self._engine.num_replicas).cpu()
        loss, with_twice, num_failed, num_said, rounding = numbers.tolist()
        if num_said:  # a `LossOutput` has its own number of items
            self._run.losses.question = None
            return
        self._losses = loss, with_twice
        finding = LossFinding.MIXED if num_failed else compare_losses(loss, with_twice, rounding=rounding)
        if finding is None:
            self._tries_left -= loss != 0.0  # a loss of zero, as at the start of a warm-up, decides nothing
            if self._tries_left > 0:
                return
            finding = LossFinding.MIXED
        self._settle(finding)
        self._report(failed, num_items)

    def _settle(self, finding: LossFinding) -> None:
        run = self._run
        assert run.losses.rule is not None
        self.finding = finding
        run.losses.rule = run.losses.rule.settled(finding, weighting=self._weighting)
        run.losses.question = None
        run.losses.note = self.note
        if run.losses.rule.is_mean:
            self._engine.note_mean_losses()

    def _report(self, failed: BaseException | None, num_items: Any) -> None:
        """Shows the answer, and writes it into the journal."""
        state = self._run.progress.state
        if not state.is_world_process_zero:
            return
        if self.finding is LossFinding.MIXED and self._weighting is None:
            logger.warning("%s", self._warning(failed, float(num_items)))
        self._show(f"loss      {self.note}")
        if (journal := live_journal(self._folder)) is not None:
            journal.write("loss", step=state.global_step + 1, num_items=float(num_items), **self._about())

    def _about(self) -> JSONObject:
        assert self.finding is not None
        return {"finding": self.finding.value, "text": self.note, "losses": list(self._losses or ())}

    @property
    def note(self) -> str:
        """The answer, for the lines about a run; "" while there is none."""
        if self.finding is None:
            return ""
        by_weighting = "" if self._weighting is None else f" (loss_weighting={self._weighting!r})"
        mean = f"mean over the {self._factor} micro-batches of a step{by_weighting}"
        original = "loss_weighting='original' adds up their means, as transformers does"
        if self.finding is LossFinding.DIVIDED:
            return f"sum over the micro-batches of a step, since {self._subject} divides by num_items_in_batch"
        if self.finding is LossFinding.MEAN:
            return f"{mean}, since {self._subject} does not divide by num_items_in_batch; {original}"
        if self._weighting is not None:
            return mean
        return (
            f"sum over the micro-batches of a step, as in transformers: {self._subject} is neither a mean nor divided"
        )

    def _warning(self, failed: BaseException | None, num_items: float) -> str:
        cure = (
            "The losses of a step's micro-batches are added up, as in transformers. Set loss_is_scaled_for_ga in the "
            "trainer: True if that is right, False for a mean; or return LossOutput(loss, num_items=...)."
        )
        if failed is not None:
            return (
                f"{self._subject} could not be computed twice for a micro-batch ({type(failed).__name__}: {failed}), "
                f"so it is not known whether it is a mean or divided by num_items_in_batch. {cure}"
            )
        loss, with_twice = self._losses or (0.0, 0.0)
        return (
            f"{self._subject} gives a loss of {loss:.6g} for num_items_in_batch={num_items:.0f} and of "
            f"{with_twice:.6g} for twice that number: neither the same, as a mean, nor half of it; or it depends on "
            f"more than its inputs, such as random numbers of its own. {cure}"
        )


class _Answer:
    """A loss as a number, or why there is none."""

    def __init__(
        self,
        value: float = 0.0,
        *,
        auxiliary: float = 0.0,
        rounding: float = 0.0,
        is_said: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.value = value
        self.auxiliary = auxiliary  # the part of it that is a mean over samples, and is weighted as such
        self.rounding = rounding
        self.is_said = is_said  # the loss itself says how it is normalised
        self.error = error

    @classmethod
    def from_result(cls, loss: Any, auxiliary: float) -> _Answer:
        """Returns the answer for a result of `compute_loss`."""
        is_said = isinstance(loss, LossOutput) and loss.num_items is not None
        if isinstance(loss, LossOutput):
            loss = loss.loss
        if not isinstance(loss, torch.Tensor):
            return cls(error=TypeError(f"a loss of type {type(loss).__name__}"))
        value = float(loss.detach().double().mean()) - auxiliary
        rounding = torch.finfo(loss.dtype).eps if loss.is_floating_point() else 0.0
        return cls(value, auxiliary=auxiliary, rounding=rounding, is_said=is_said)


class _NoEvents:
    """Receives the events that a loss fires while it is computed once more."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def fire(self, event: str, progress: object, **kwargs: object) -> None: ...


@contextmanager
def _without_events(hooks: Any) -> Iterator[None]:
    handler = hooks.callback_handler
    hooks.callback_handler = _NoEvents(handler)
    try:
        yield
    finally:
        hooks.callback_handler = handler


# -- the code that it is about -----------------------------------------------------------------------------------------


def hash_functions(functions: Iterable[object]) -> str:
    """Returns a hash of the names and the code of functions; code that cannot be seen counts by the names alone."""
    digest = hashlib.sha256()
    for function in functions:
        found: Any = inspect.unwrap(function) if callable(function) else function
        code = getattr(found, "__code__", None)
        digest.update(getattr(found, "__qualname__", type(found).__qualname__).encode())
        if isinstance(code, CodeType):
            digest.update(repr(list(_walk_code(code))).encode())
    return digest.hexdigest()


def _walk_code(code: CodeType) -> Iterator[object]:
    """Yields what a function does: its instructions, names and constants, also of the functions within it."""
    yield code.co_code.hex()
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield list(_walk_code(constant))
        elif not isinstance(constant, frozenset):  # its order is another one in each process
            yield constant
