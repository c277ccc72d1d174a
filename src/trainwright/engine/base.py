"""Engine: everything that differs between backends, as one list of methods. The default is that of one process.

Backward, clipping, the optimizer step and zero_grad are here, once for all backends. How a model is wrapped, and where
its parameters are, belongs to the engine of each backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn

from trainwright._types import DataLoaderLike, Optimizer, Prepared, Scheduler, StateDict
from trainwright.config.plans import EnginePlan
from trainwright.distributed.device import empty_cache, peak_flops
from trainwright.engine.gradients import (
    clip_with_sparse,
    has_sparse_gradients,
    norm_with_sparse,
    noting_step,
    with_gradients,
)
from trainwright.engine.precision import autocast_forward
from trainwright.state.interrupts import Interrupts
from trainwright.support.model_facts import tie_again, tied_parameters, uncompiled
from trainwright.support.optimizer_facts import held_tensors

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]
MakeScheduler: TypeAlias = Callable[[Optimizer], Scheduler]
Count: TypeAlias = Callable[[Iterable[torch.Tensor], str], None]  # of a plan of memory: tensors, and their kind
NO_CONTEXT: AbstractContextManager[None] = nullcontext()  # without state, so one serves all


class Engine:
    """Placement, precision, updates and collectives of one trainer."""

    def __init__(self, plan: EnginePlan, accelerator: Accelerator, device: torch.device) -> None:
        self.accelerator = accelerator  # a real `accelerate.Accelerator`, which users and libraries read
        self.device = device  # where batches go
        self.non_blocking = plan.non_blocking  # whether batches are copied to the device without waiting
        self.input_dtype: torch.dtype | None = None  # cast floating-point tensors of a batch to this; None: leave them
        self._plan = plan
        self._scaler: torch.amp.GradScaler | None = getattr(accelerator, "scaler", None)
        self._optimizer: Optimizer = None
        self.defers_skips = False  # `step` does not wait to learn whether a fused optimizer skipped (fp16)
        self._skip_flag: torch.Tensor | None = None  # for an update with an outcome that only the device knows
        self._has_sparse = False  # an embedding of the model has sparse gradients
        self._walked: list[nn.Parameter] | None = None  # from `clip` to `zero_grad`, where both walk the same model

    # -- models ----------------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """Moves the user's model to the training device. Tied weights stay one parameter on any device."""
        ties = tied_parameters(model)
        moved = model.to(self.device)
        tie_again(model, ties)
        return moved

    def expect(self, *, num_steps: int, num_warmup_steps: int) -> None:
        """Announces the optimizer steps of a run before `setup`, for backends with a schedule of their own."""

    def noting_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the function with which tensors of batches are copied to the device while a step is computed.

        An engine that decides by the values of a batch looks at them here, where they are in main memory.

        Args:
            copy: returns a tensor on the device.
        """
        return copy

    def note_outputs(self, are_read: bool) -> None:
        """Announces, before the first step of a run, whether extensions read the model's outputs in training."""

    def setup(self, model: nn.Module, *, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> Prepared:
        """Wraps a placed model for training, and calls the two factories in the order that this backend needs."""
        wrapped, optimizer = self._wrap(model, make_optimizer)
        scheduler = make_scheduler(optimizer)
        self._begin(wrapped, optimizer)
        self.note_sync(is_last=True)  # an earlier run may have ended within a window
        return Prepared(self._compiled(wrapped), optimizer, scheduler)

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Returns the model in the wrapper of this backend, and its optimizer. Override this or `setup`."""
        return model, make_optimizer(model)

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        """Returns a placed model as an evaluation outside of training calls it."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the user's module inside the wrappers of this backend."""
        return uncompiled(model)

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Stores the model to be updated and its optimizer."""
        self._optimizer = optimizer
        self._skip_flag = None
        self._has_sparse = has_sparse_gradients(model)
        self._walked = None

    def updated_tensors(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """Yields the tensors that an optimizer refers to; the parameters that it updates are among them."""
        yield from held_tensors(optimizer)

    def _compiled(self, model: nn.Module) -> nn.Module:
        """Returns the model compiled as the plan says."""
        plan = self._plan.compile
        if plan.backend is None:
            return model
        return torch.compile(model, backend=plan.backend, mode=plan.mode)  # type: ignore[return-value]

    # -- a step ----------------------------------------------------------------------------------------------------

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        """Context of the model's forward pass in mixed precision, if planned; `keeps_outputs` returns all in fp32."""
        return autocast_forward(model, self._plan.precision, self.device, keeps_outputs=keeps_outputs)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """Context of the forward and backward pass of one micro-batch; `sync` averages gradients over processes."""
        return NO_CONTEXT

    def note_sync(self, is_last: bool) -> None:
        """Sets `accelerator.sync_gradients`, which overrides and libraries read.

        Args:
            is_last: the next micro-batch is the last of its window.
        """
        self.accelerator.gradient_state.sync_gradients = is_last

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None) -> None:
        """Computes the gradients of a loss and adds them to the gradients of the window; for fp16 they are scaled here.

        A replaced `accelerator.backward` is called as in the original Trainer. Accelerate's own does the same
        work, and divides the loss by one before.

        Args:
            loss: a scalar with its graph, divided for the window already.
            gradient: a scalar with which the backward pass begins, in place of 1.
        """
        accelerator = self.accelerator
        is_own = is_from(accelerator.backward, "accelerate") and accelerator.gradient_accumulation_steps == 1
        if gradient is not None and not (is_own and is_from(type(loss).backward, "torch")):
            # A replacement may take nothing but the loss.
            loss.register_hook(gradient.mul)  # type: ignore[no-untyped-call]
            gradient = None
        start = {} if gradient is None else {"gradient": gradient}
        if hasattr(self._optimizer, "fused_backward"):  # LOMO updates the weights while it computes the gradients
            self._fused_backward(loss, is_own=is_own)
        elif not is_own:
            accelerator.backward(loss)
        elif self._scaler is not None:
            self._scaler.scale(loss).backward(**start)  # type: ignore[no-untyped-call]
        else:
            loss.backward(**start)  # type: ignore[no-untyped-call]

    def _fused_backward(self, loss: torch.Tensor, *, is_own: bool) -> None:
        learning_rate = self._optimizer.param_groups[0]["lr"]
        if is_own:
            self._optimizer.fused_backward(loss, learning_rate)
        else:
            self.accelerator.backward(loss, learning_rate=learning_rate)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scales gradients to a joint 2-norm of at most `max_norm`, by `accelerator.clip_grad_norm_` if it is replaced.

        Args:
            model: as the engine wrapped it; its parameters are read now, since some may be new.
            max_norm: the largest norm that is left as it is.

        Returns:
            The norm before, a detached scalar; a replacement may return another value.
        """
        self._unscale()
        clip = self.accelerator.clip_grad_norm_
        if not is_from(clip, "accelerate"):
            return clip(model.parameters(), max_norm)  # type: ignore[no-any-return]
        return self._clip(model, max_norm)

    def measure_norm(self, model: nn.Module) -> torch.Tensor:
        """Returns the joint 2-norm of the gradients, a detached scalar; they stay as they are.

        A replaced function that clips is called with infinity, as the original Trainer calls it.
        """
        functions = (self.accelerator.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
        if not all(map(is_from, functions, ("accelerate", "torch"))):
            return self.clip(model, math.inf)
        self._unscale()
        return self._measure(model)

    def _measure(self, model: nn.Module) -> torch.Tensor:
        """Measures by torch's function, without scaling the gradients by 1 as a clip to infinity does."""
        self._walked = list(model.parameters())
        if self._has_sparse:
            return norm_with_sparse(self._walked)
        return torch.nn.utils.get_total_norm([p.grad for p in self._walked if p.grad is not None])

    def _clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clips by torch's function, which accelerate calls too, as it is at this moment."""
        self._walked = list(model.parameters())
        trained = with_gradients(self._walked)
        if self._has_sparse:
            return clip_with_sparse(trained, max_norm)
        return torch.nn.utils.clip_grad_norm_(trained, max_norm)

    def _unscale(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

    @property
    def updates_in_clip(self) -> bool:
        """True if `clip` updates the weights too, so that nothing can be decided between the two."""
        return False

    @property
    def knows_norm(self) -> bool:
        """True if `clip` returns the norm, and not NaN for any step."""
        return True

    @property
    def scales_loss(self) -> bool:
        """True if losses are scaled (fp16), so that steps that overflow are skipped and lower the scale."""
        return self._scaler is not None

    def step(self, optimizer: Optimizer) -> bool:
        """Updates the weights; returns False if the update was skipped, because gradients overflowed in fp16.

        A fused optimizer skips on the device. With `defers_skips` the result is True then, and `take_skip_flag` returns
        the device's flag; otherwise the flag is read, which waits for the device.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        with noting_step(optimizer) as call:
            self._scaler.step(optimizer)
        self._scaler.update()
        if not call.is_made:
            return False  # the scaler has read the flag itself
        if call.found_inf is None or self.defers_skips:
            self._skip_flag = call.found_inf
            return True
        return call.found_inf.item() == 0.0

    def take_skip_flag(self) -> torch.Tensor | None:
        """Returns, once, a scalar on the device that is not 0 if the last update was skipped; None: `step` knew it."""
        flag = self._skip_flag
        self._skip_flag = None
        return flag

    def scale_gradients(self, model: nn.Module, factor: torch.Tensor) -> None:
        """Multiplies the accumulated gradients, which `backward` has averaged over processes, by a scalar."""
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def zero_grad(self, model: nn.Module) -> None:
        """Clears the gradients by the model's own method.

        Where that is torch's, it would walk through all modules a second time in a step: `clip` has just done so. A
        frozen parameter may have got a gradient since, from a callback.
        """
        parameters = self._walked
        self._walked = None
        clear = model.zero_grad
        is_own = getattr(clear, "__func__", None) is nn.Module.zero_grad and is_from(clear, "torch")
        if parameters is None or not is_own:
            clear()
            return
        for parameter in parameters:
            parameter.grad = None

    def begin_epoch(self, model: nn.Module) -> None:
        """Frees parameters that a forward pass has left gathered whole, so that the next one sees changes of the parts.

        Nothing to do where each process has the whole model. Called before the first step of an epoch too.
        """

    def evaluating(self, *, keeps_outputs: bool) -> AbstractContextManager[None]:
        """Context of an evaluation loop; without `keeps_outputs` only the losses of its batches are read."""
        return NO_CONTEXT

    def generating(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """Context of `model.generate`, with the keywords that it needs if processes share a model."""
        return nullcontext({})

    @property
    def averages_new_parameters(self) -> bool:
        """True if gradients of parameters that require one only after `setup` are averaged over processes."""
        return True

    @property
    def trains_bare(self) -> bool:
        """True if a model can be run and differentiated before `setup`, as the rehearsal of a step does."""
        return False

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        """True if this process has only a part of each parameter."""
        return False

    @property
    def hides_weights(self) -> str | None:
        """Reason for which the model's parameters are not the trained weights; None: they can be read and replaced.

        Each is whole then, or a `DTensor` of which this process has a part.
        """
        return None

    def keeps_evaluation(self, model: nn.Module) -> str | None:
        """Returns why a copy of the model in another process cannot evaluate with the `finished_weights` of this one.

        Args:
            model: as it was given to the trainer, not wrapped yet.

        Returns:
            The reason with its cure; None: the copy computes with the numbers that this process does.
        """
        return self.hides_weights

    def whole_tensor(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor that is distributed over the processes like a parameter. All processes call it.

        Args:
            parameter: of the model.
            part: local part of the tensor; its type and device may differ from the parameter's.

        Returns:
            The whole tensor in all processes.
        """
        return part

    def take_tensor_part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Returns the part of a whole tensor that this process would have of a parameter; see `whole_tensor`."""
        return whole

    @property
    def changes_layers(self) -> str | None:
        """Reason for which layers of the user's model do not run whole and uncompiled; None if they do."""
        plan = self._plan
        if plan.fsdp is not None or plan.deepspeed is not None or plan.parallel is not None:
            return "a process may hold only a part of the output layer"
        return None if plan.compile.backend is None else "torch_compile compiles the whole model"

    @property
    def hides_output_layer(self) -> str | None:
        """Reason why the output layer is incomplete when a model computes its loss; None if it is complete."""
        return self.changes_layers

    @property
    def writes_parts(self) -> bool:
        """True if checkpoints are sharded, so that each process writes its part of model and optimizer."""
        return False

    def save_parts(self, folder: Path, optimizer: Optimizer | None, *, put: Callable[..., None]) -> None:
        """Writes the sharded model of a checkpoint, and its optimizer unless that is None. All processes call it.

        `put(tree, write, shared=True)` calls `write` with plain tensors that have the values of now, in all processes
        at once or in all asynchronously.
        """
        raise AssertionError("only called where writes_parts is True")

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Gathers sharded weights whole into the main process; None: the model has them. All processes call it."""
        return None

    def finished_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Gathers weights as `whole_weights` does, in the type that the model computes with: to use, not to resume."""
        return self.whole_weights(model)

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        """Loads whole weights on every process, which keeps its own part. Returns the keys that did not match."""
        return model.load_state_dict(weights, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Returns the state as one process would have it, perhaps in the main process only. All processes call it."""
        state: StateDict = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict) -> None:
        """Loads a state as `optimizer_state` returns it, which all processes have; each keeps its part."""
        optimizer.load_state_dict(state)

    # -- between processes -----------------------------------------------------------------------------------------

    @property
    def dispatches(self) -> bool:
        """True if the main process reads the training data for all."""
        return self.num_replicas > 1 and bool(self._plan.loaders.dispatch_batches)

    def modules_that_wait(self, model: nn.Module) -> list[nn.Module] | None:
        """Returns the modules whose forward hooks wait for other processes, as where they gather weights.

        None: a forward pass waits for others within its work too, where nothing public tells one from the other.
        """
        return []

    def dispatch(self, dataloader: DataLoaderLike) -> Any:
        """Has the main process read the batches for all processes, and gives each process its part of each batch."""
        return dataloader

    def gather(self, value: Any) -> Any:
        """Gathers a nested value of tensors from all replicas, concatenated along the first dimension in their order.

        First dimensions may differ; if another one does, missing values are -100.
        """
        return value

    def gather_objects(self, value: T) -> list[T]:
        """Gathers one object of each process, in the order of ranks; for small values that are no tensors."""
        return [value]

    def gather_replica_objects(self, value: T) -> list[T]:
        """Gathers one object of each replica, in their order."""
        return self.gather_objects(value)

    def gather_counts(self, count: int) -> list[int]:
        """Gathers a number of each replica from and to main memory, so that no device is synchronized."""
        return [count]

    def gather_objects_in_background(self, value: T) -> list[T]:
        """Gathers objects from a background thread, over a process group separate from training's."""
        return [value]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor, of the same shape in all processes, over the replicas."""
        return tensor

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Starts `sum`, and returns a function that waits for the result.

        None if processes wait for each other at the beginning of a forward pass anyway: then nothing is started.
        """
        return None

    def sum_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor, of the same shape in all processes, over those that have tokens of their own.

        These are the replicas, and the processes with a part of the same sequences.
        """
        return self.sum(tensor)

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks a tensor of each replica, of the same shape in all, along a new first dimension."""
        return tensor.unsqueeze(0)

    def agree(self, decide: Callable[[], T]) -> T:
        """Calls a function in the main process, and returns its result, or raises its error, in all of them.

        For whatever depends on files, time or chance, so that no process decides otherwise.
        """
        return decide()

    def together(self, interrupts: Interrupts) -> AbstractContextManager[None]:
        """Context of work that all processes do: an error or a signal in one ends all, at the same step.

        May be nested; the outermost context counts. `interrupts` counts the steps of the work.
        """
        from trainwright.distributed.watchdog import watch_single_process

        return watch_single_process(self._plan.hang_timeout_s, interrupts)

    def show_buffers(self, count: Count) -> None:
        """Announces tensors of this engine to a plan of memory, once after `setup`, those of a step when it makes them.

        Args:
            count: is called with tensors and their kind, such as "communication".
        """

    @property
    def settles_in(self) -> int:
        """Steps after which a plan of memory finds this engine as it is for the rest of a run."""
        return 0

    def host_bytes(self, optimizer: Optimizer) -> int:
        """Returns the bytes that this engine holds in main memory for a device, as a plan of memory counts them."""
        return 0

    def saved_bytes(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, int] | None:
        """Returns the bytes of weights and optimizer states in a checkpoint; None if their tensors show them."""
        return None

    def peak_flops(self) -> float | None:
        """Peak operations per second of all devices of this run together; None if unknown."""
        peak = peak_flops(self.device)
        return None if peak is None else peak * self.num_processes

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if an error says that the device's memory is full, so that a smaller batch might fit."""
        from accelerate.utils.memory import should_reduce_batch_size

        return isinstance(error, torch.OutOfMemoryError) or bool(should_reduce_batch_size(error))

    def empty_cache(self) -> None:
        """Frees the memory of the device that torch holds without using it."""
        empty_cache(self.device)

    def barrier(self) -> None:
        """Waits for all processes."""

    def published_flags(self) -> dict[str, Any]:
        """Attributes of the trainer that name its backend; read again when it is set up."""
        of_tpus = dict.fromkeys(("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"), False)
        return {"deepspeed": None, **of_tpus} | {
            f"is_{brand}_enabled": getattr(self.accelerator.state, f"{brand}_plugin", None) is not None
            for brand in ("deepspeed", "fsdp")
        }

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return 1

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the model: groups of processes that work on the same batches."""
        return self.num_processes

    @property
    def replica(self) -> int:
        """Number of the replica that this process belongs to, from 0."""
        return 0

    @property
    def num_batch_parts(self) -> int:
        """Number of parts into which this process splits a batch, each with a loss of its own."""
        return 1

    def note_mean_losses(self) -> None:
        """Notes that the model's losses are means although it is given the number of items."""


def is_from(function: object, package: str) -> bool:
    """Returns True if a function, or method, is written in a package itself; a wrapper or replacement is not."""
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    return str(scope.get("__name__")).partition(".")[0] == package
