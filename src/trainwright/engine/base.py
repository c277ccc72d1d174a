"""Engine: all that differs between backends, as one abstract list. The identity is the default where there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from trainwright._types import Prepared
from trainwright.engine.device_info import peak_flops
from trainwright.engine.updates import Updates, empty_cache, is_out_of_memory
from trainwright.state.interrupts import Interrupts

T = TypeVar("T")
NO_CONTEXT: AbstractContextManager[None] = nullcontext()  # without state, so one serves all


class Engine(ABC):
    """Placement, precision and collectives for one trainer.

    Attributes:
        accelerator: a real `accelerate.Accelerator`; people and libraries read it.
        device: where batches go.
    """

    accelerator: Any
    device: torch.device
    non_blocking: bool = False  # batches are copied to the device without waiting
    _updates: Updates  # of the weights; a backend that has its own way does without
    input_dtype: torch.dtype | None = None  # of a batch's floating-point tensors; None: the one that they have

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Moves a model to where it is trained."""

    def expect(self, *, num_steps: int, num_warmup_steps: int) -> None:
        """Told before `setup` how long the run is, for backends with a schedule of their own."""
        return None

    @abstractmethod
    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Any],
        make_scheduler: Callable[[Any], Any],
    ) -> Prepared:
        """Wraps the model and calls the two factories in the order this backend needs."""

    @abstractmethod
    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        """The model as an evaluation outside of training uses it."""

    @abstractmethod
    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        """While it lasts, the model's forward runs in mixed precision, if that was asked for.

        `keeps_outputs`: somebody uses the outputs besides the loss in training, so they are wanted in fp32.
        """

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._updates.backward(loss, **kwargs)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scales gradients down to `max_norm` and returns their norm before; infinity only measures."""
        return self._updates.clip(max_norm)

    def step(self, optimizer: Any) -> bool:
        """Updates the weights; False if the update was skipped because gradients overflowed."""
        return self._updates.step(optimizer)

    def zero_grad(self) -> None:
        self._updates.zero_grad()

    def refresh(self, model: nn.Module) -> None:
        """Looks again at which parameters the model has; called when an epoch begins."""
        self._updates.refresh(model)

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's module inside the wrappers of this backend."""

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch; `sync` is True for the last of a window."""
        return NO_CONTEXT

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """Around `model.generate`; gives the keywords that it needs where processes hold parts of the model."""
        return nullcontext({})

    @property
    def trains_bare(self) -> bool:
        """Whether a model can be run and differentiated as it is, before `setup`: what a rehearsal of a step needs."""
        return False

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        """Whether this process has only its part of each parameter."""
        return False

    @property
    def writes_parts(self) -> bool:
        """Whether checkpoints have model and optimizer in parts, each process writing its own."""
        return False

    def save_parts(self, folder: Path, optimizer: Any | None, *, put: Callable[..., None]) -> None:
        """Writes a checkpoint's model, and its optimizer if one is given, in parts. All processes call it.

        `put(tree, write, shared=True)` calls `write` with plain tensors as they are now, in all processes at once or in
        all later, behind training's back.
        """
        raise AssertionError("only called where writes_parts is True")

    def weights_in_parts(self, folder: Path) -> Mapping[str, torch.Tensor] | None:
        """The weights of a checkpoint in parts, whole, whichever processes wrote them; None: it has none in parts."""
        from trainwright.engine import sharded_state

        return sharded_state.read_weights(folder) if sharded_state.has_weights(folder) else None

    def load_optimizer_in_parts(self, folder: Path, model: nn.Module, optimizer: Any) -> bool:
        """Loads the optimizer of a checkpoint in parts; False: it has none in parts."""
        from trainwright.engine import sharded_state

        if not sharded_state.has_optimizer(folder):
            return False
        sharded_state.load_optimizer(folder, model, optimizer)
        return True

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """All weights, in the main process, of a model whose parts are in several; None: the model has them itself.

        All processes call it.
        """
        return None

    def finished_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """As `whole_weights`, for use and not for a resume: in the type that the model computes with."""
        return self.whole_weights(model)

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        """Takes whole weights in, each process what it holds; returns the keys that did not match, as torch does."""
        return model.load_state_dict(weights, strict=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state as one process alone has it; may be empty in all but the main one. All call it."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Takes such a state in, each process what it holds."""
        optimizer.load_state_dict(state)

    # -- between processes -----------------------------------------------------------------------------------------

    def dispatch(self, dataloader: Any) -> Any:
        """A dataloader of whole batches that the main process reads alone; every process gets its part of each."""
        return dataloader

    def gather(self, value: Any) -> Any:
        """A nested value of tensors, one of each replica, concatenated along the first dimension in their order.

        First dimensions may differ; where another one does, what is missing is -100.
        """
        return value

    def gather_objects(self, value: T) -> list[T]:
        """One object of each process, by rank; for small things that tensors cannot hold."""
        return [value]

    def objects_of_replicas(self, value: T) -> list[T]:
        """The same, one of each replica."""
        return self.gather_objects(value)

    def gather_counts(self, count: int) -> list[int]:
        """A number of each replica, in order, from main memory to main memory, so that no device is waited for."""
        return [count]

    def gather_objects_in_background(self, value: T) -> list[T]:
        """As `gather_objects`, for threads that work behind training's back; its order is theirs alone."""
        return [value]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the replicas."""
        return tensor

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of each replica, along a new first dimension; all have one shape."""
        return tensor.unsqueeze(0)

    def agree(self, decide: Callable[[], T]) -> T:
        """What the main process decides, in all of them; an error of its decision is raised in all of them too.

        For whatever depends on files, time or chance: processes that decide for themselves may part.
        """
        return decide()

    def together(self, interrupts: Interrupts) -> AbstractContextManager[None]:
        """Around work that all processes do: an error in one ends all, and so does a signal, at the same place.

        May be entered again inside; the outermost one counts.
        """
        return NO_CONTEXT

    def peak_flops(self) -> float | None:
        """Operations per second that the devices of this run can do together; None where it is not known."""
        peak = peak_flops(self.device)
        return None if peak is None else peak * self.num_processes

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device's memory is full, so that a smaller batch might fit."""
        return is_out_of_memory(error)

    def empty_cache(self) -> None:
        """Gives memory that torch holds but does not use back to the device."""
        empty_cache(self.device)

    def barrier(self) -> None:
        """Waits until all processes are here."""
        return None

    def published_flags(self) -> dict[str, Any]:
        """Attributes by which others ask a trainer for its backend; asked again when it is set up."""
        return {
            f"is_{brand}_enabled": getattr(self.accelerator.state, f"{brand}_plugin", None) is not None
            for brand in ("deepspeed", "fsdp")
        }

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def num_replicas(self) -> int:
        """Groups of processes that have batches of their own; those of a group work on the same ones."""
        return self.num_processes

    @property
    def replica(self) -> int:
        """The number of this process's group."""
        return 0
