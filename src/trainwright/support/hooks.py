"""Protocols of the objects that a loop calls. The trainer is the hooks: the loops call its most derived methods.

These are the published names that subclasses override, so they keep the spelling of the outside world.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trainwright._types import Batch, DataLoaderLike, Model, SampleIds, StateDict, Trial
from trainwright.support.signatures import read_parameters, read_signature


class Stateful(Protocol):
    """Object with a state in torch's form: a schedule, a scaler, a module, an item of a checkpoint."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


class TrainHooks(Protocol):
    """Methods of the trainer that the training loop calls."""

    current_gradient_accumulation_steps: int
    optimizer: Any
    lr_scheduler: Any

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]: ...
    def prepare_window(self, batches: list[Batch]) -> list[Batch]: ...
    def _get_num_items_in_batch(
        self, batch_samples: list[Batch], device: torch.device
    ) -> torch.Tensor | int | None: ...
    def training_step(
        self, model: Model, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor: ...
    def floating_point_ops(self, inputs: Batch) -> float: ...
    def _track_num_input_tokens(self, inputs: Batch) -> None: ...
    def _clip_grad_norm(self, model: Model) -> torch.Tensor | float: ...
    def _get_grad_norm(self, model: Model, grad_norm: Any = None) -> Any: ...
    def _get_learning_rate(self) -> float: ...
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...
    def _update_auto_batch_size(self, batch_size: int) -> None: ...
    def _save_checkpoint(self, model: Model, trial: Trial) -> None: ...
    def _evaluate(self, trial: Trial, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]: ...
    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Model,
        trial: Trial,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None: ...


class SaveHooks(Protocol):
    """Methods of the trainer that write the parts of a checkpoint into a folder."""

    model: Model
    optimizer: Any
    callback_handler: Any
    checkpoint_items: dict[str, Stateful]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...


class EvalHooks(Protocol):
    """Methods of the trainer that the evaluation loop calls."""

    def prediction_step(
        self, model: Model, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]: ...
    def num_examples(self, dataloader: DataLoaderLike) -> int: ...
    def _prepare_input(self, data: Any) -> Any: ...


class Events(Protocol):
    """Dispatch of a loop's events to the callbacks."""

    def fire(self, event: str, progress: Any, **kwargs: Any) -> None: ...


class LoopEngine(Protocol):
    """The part of an engine that the training loop uses."""

    device: torch.device

    @property
    def updates_in_clip(self) -> bool: ...
    @property
    def num_replicas(self) -> int: ...
    def sum(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def sum_tokens(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def scale_gradients(self, model: Model, factor: torch.Tensor) -> None: ...
    def accumulate(self, model: Model, *, sync: bool) -> AbstractContextManager[Any]: ...
    def unwrap(self, model: Model) -> Model: ...
    def note_sync(self, is_last: bool) -> None: ...
    def step(self, optimizer: Any) -> bool: ...
    def zero_grad(self, model: Model) -> None: ...
    def begin_epoch(self, model: Model) -> None: ...
    def empty_cache(self) -> None: ...
    def is_out_of_memory(self, error: BaseException) -> bool: ...


class RandomStates(Protocol):
    """Random states of this process; `checkpoint.rng` has these functions."""

    def capture(self) -> Any: ...
    def restore(self, states: Any) -> None: ...


class BatchSource(Protocol):
    """The part of a loader that the training loop uses; after an epoch's last batch it `has_ended`."""

    is_stale: bool
    has_ended_early: bool

    @property
    def has_ended(self) -> bool: ...

    def again(self, epoch: int, *, skip_batches: int) -> Iterator[Batch]: ...
    def epoch(self, epoch: int, *, skip_batches: int = 0, after_first: Any = None) -> Iterator[Batch]: ...
    def begin_window(self, random_states: Any = None) -> None: ...
    def read_ids(self, batches: Sequence[Batch]) -> Sequence[SampleIds]: ...
    def rewind(self) -> None: ...


HOME = f"{__name__.partition('.')[0]}."  # how the modules of this package begin


def definer(owner: object, name: str) -> type | None:
    """Returns the class that defines an attribute; None if the object itself defines it, or nothing does."""
    if name in vars(owner):
        return None
    return next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)


def is_overridden(owner: object, *names: str) -> bool:
    """Returns True if code outside this package defines one of these methods, in a subclass or on the object."""
    for name in names:
        cls = definer(owner, name)
        if cls is None or not (cls.__module__.startswith(HOME) and _is_ours(getattr(cls, name, None))):
            return True
    return False


def has_hook(owner: object, name: str, *, num_arguments: int) -> bool:
    """Returns True if code outside this package overrides a hook of ours, by a callable that takes its arguments.

    Where a subclass uses the name for something else, that is its own.
    """
    found = getattr(owner, name, None)
    if not is_overridden(owner, name) or not callable(found):
        return False
    signature = read_signature(found)
    if signature is None:
        return True
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def accept_older_signatures(trainer: object) -> None:
    """Lets a trainer's overrides with the parameters of an older version be called with the arguments that they take.

    `compute_loss(self, model, inputs, return_outputs=False)` is called without `num_items_in_batch`, for example. Each
    such override is replaced by an adapter in the class (or object) that has it, once; others are called as they are.
    """
    classes = type(trainer).__mro__[:-1]
    for place, cls in enumerate(classes):
        for name, value in list(vars(cls).items()):
            is_static = isinstance(value, staticmethod)
            function = value.__func__ if is_static else value
            if not inspect.isfunction(function) or _is_ours(function):
                continue
            base = _find_package_method(name, classes[place + 1 :])
            is_hook = base is not None and isinstance(base, staticmethod) == is_static
            if is_hook and (adapter := _adapter(function, _parameters(base))):
                setattr(cls, name, staticmethod(adapter) if is_static else adapter)
    for name, function in list(vars(trainer).items()):
        if callable(function) and (base := _find_package_method(name, classes)) is not None:
            parameters = _parameters(base)
            if adapter := _adapter(function, parameters if isinstance(base, staticmethod) else parameters[1:]):
                vars(trainer)[name] = adapter


def takes_no_grad_norm_too(hook: Callable[..., None]) -> Callable[..., None]:
    """Lets an override of `_maybe_log_save_evaluate` call it with the parameters of 4.34 to 4.37: no `grad_norm`."""
    others = frozenset(("model", "trial", "epoch", "ignore_keys_for_eval"))

    @functools.wraps(hook)
    def call(trainer: object, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if len(args) < len(others) + 1 and "grad_norm" not in kwargs and len(args) + len(others & kwargs.keys()) == 4:
            args = (None, *args)
        hook(trainer, tr_loss, *args, **kwargs)

    return call


def takes_metrics_too(hook: Callable[..., None]) -> Callable[..., None]:
    """Lets an override of `_save_checkpoint` call it with the `metrics` of older versions, which have no effect."""

    @functools.wraps(hook)
    def call(trainer: object, model: object, trial: object, metrics: object = None) -> None:
        hook(trainer, model, trial)

    return call


def missing_names(function: object) -> Sequence[str]:
    """Parameters of a hook that an override with an older signature is not given."""
    left = getattr(function, "left_out", ())
    # a mock has every attribute
    return left if isinstance(left, tuple) else ()


def _is_ours(function: object) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.startswith(HOME)


def _find_package_method(name: str, classes: Sequence[type]) -> object:
    """The method of this package with that name, a static one as such; None if there is none."""
    for value in (vars(cls)[name] for cls in classes if name in vars(cls)):
        function = value.__func__ if isinstance(value, staticmethod) else value
        if inspect.isfunction(function) and _is_ours(function) and not name.startswith("__"):
            return value
    return None


def _parameters(base: Any) -> list[str]:
    function = base.__func__ if isinstance(base, staticmethod) else base
    parameters = (read_parameters(function) or {}).values()
    return [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def _adapter(function: Any, wanted: Sequence[str]) -> Callable[..., Any] | None:
    """A function that calls `function` with the `wanted` parameters that it has, and None for others.

    None where `function` takes the wanted parameters and needs no others.
    """
    taken = read_parameters(function)
    if taken is None:
        return None
    kinds = {one.kind for one in taken.values()}
    takes_names = inspect.Parameter.VAR_KEYWORD in kinds
    takes_more = inspect.Parameter.VAR_POSITIONAL in kinds
    own = [n for n, one in taken.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    missing = frozenset(wanted) - taken.keys()
    # Arguments of an older version beyond the hook's parameters, as `metrics` of `_save_checkpoint`: None is given.
    added = [name for name in own[len(wanted) :] if taken[name].default is inspect.Parameter.empty]
    if hasattr(function, "left_out") or not (missing or added) or (takes_names and takes_more):
        return None
    # A parameter with another name corresponds to the hook's parameter at its position.
    order = [
        own[i] if name in missing and i < len(own) and own[i] not in wanted else name for i, name in enumerate(wanted)
    ]

    @functools.wraps(function)
    def adapter(*args: Any, **kwargs: Any) -> Any:
        if added:
            kwargs = {**dict.fromkeys(name for name in added if name not in own[: len(args)]), **kwargs}
        fits = (len(args) <= len(own) or takes_more) and (takes_names or kwargs.keys() <= taken.keys())
        if fits or len(args) > len(order):
            return function(*args, **kwargs)
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        return function(**{name: value for name, value in given.items() if takes_names or name not in missing})

    adapter.left_out = () if takes_names else tuple(missing)  # type: ignore[attr-defined]
    return adapter
