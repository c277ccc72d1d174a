"""Changes to a model for one run: each is applied before it and undone after it, where it can be undone.

Activation checkpointing, fused kernels (Liger), noise on embeddings (NEFTune), detection of overflow, special tokens,
state of recurrent models.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from trainwright._types import Batch, Model, is_instance_of
from trainwright.errors import ModelError, needs_package
from trainwright.model_facts import core_model

logger = logging.getLogger(__name__)

Options: TypeAlias = dict[str, Any]  # keywords of torch's or transformers' checkpointing
Forward: TypeAlias = Callable[..., object]


@contextmanager
def checkpointed_activations(model: nn.Module, options: Options | None) -> Iterator[None]:
    """Turns checkpointing on for a run and off after it, unless the user had turned it on already.

    Of a model without transformers' methods for it, the layers in its ModuleLists (or Sequentials, if it has no list)
    are checkpointed; without any it is a ModelError. `options` are `every_n_layers`, `offload`, and arguments of
    torch's `checkpoint`.
    """
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    was_on = getattr(model, f"is_{name}_checkpointing", False)  # asking by the older name warns
    rest = dict(options or {})
    layers, offload = rest.pop("every_n_layers", 1), rest.pop("offload", False)
    if not hasattr(model, f"{name}_checkpointing_enable"):
        with _checkpointed_layers(model, rest, every_n_layers=layers, offload=offload):
            yield
        return
    if name == "gradient" and (layers != 1 or offload):
        raise ModelError(
            f"every_n_layers={layers} and offload={offload} in activation_checkpointing_kwargs need models of "
            "transformers 5.23 or newer. Upgrade transformers, or leave them out."
        )
    extras = {"every_n_layers": layers, "offload": offload} if name == "activation" else {}
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": rest or None}, **extras)
    try:
        yield
    finally:
        if not was_on:
            getattr(model, f"{name}_checkpointing_disable")()


@contextmanager
def _checkpointed_layers(model: nn.Module, options: Options, *, every_n_layers: int, offload: bool) -> Iterator[None]:
    layers = _layers_of(model)[::every_n_layers]
    if not layers:
        raise ModelError(
            f"activation_checkpointing=True, and {type(model).__name__} has no ModuleList or Sequential whose layers "
            "could be checkpointed. Keep its layers in one, or set activation_checkpointing=False."
        )
    options = {"use_reentrant": False, **options}
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, options, offload=offload)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed(forward: Forward, options: Options, *, offload: bool) -> Forward:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: Any) -> object:  # keywords of the layer
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
            return checkpoint(forward, *args, **options, **kwargs)

    return run


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of layers."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [module for module in model.modules() if type(module) is kind]
        inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
        layers = [layer for found in lists if id(found) not in inner for layer in found]
        if layers:
            return [layer for layer in layers if any(True for _ in layer.parameters())]
    return []


def apply_liger_kernel(model: nn.Module, kernel_config: dict[str, bool] | None) -> None:
    """Puts Liger's kernels into a model. They stay: Liger has no way back for an instance.

    Args:
        model: a model that Liger knows, perhaps in an adapter.
        kernel_config: single kernels by name, on or off; None: Liger's own choice.

    Raises:
        MissingPackageError: liger-kernel is not installed.
    """
    need = "use_liger_kernel=True needs the liger-kernel package (and a GPU that Triton supports)"
    with needs_package(f"{need}: pip install liger-kernel"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    _apply_liger_kernel_to_instance(model=core_model(model), **(kernel_config or {}))


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float) -> Iterator[None]:
    """Adds noise of at most `alpha / sqrt(tokens x dimensions)` to the input embeddings, in training mode only."""
    find = getattr(core_model(model), "get_input_embeddings", None)
    if find is None:
        raise ModelError(
            f"neftune_noise_alpha={alpha} adds noise to the input embeddings, and {type(model).__name__} has no "
            "get_input_embeddings() to find them by. Define it, or leave neftune_noise_alpha unset."
        )
    handle = find().register_forward_hook(_noise(alpha))
    try:
        yield
    finally:
        handle.remove()


def _noise(alpha: float) -> Callable[[torch.nn.Module, object, torch.Tensor], torch.Tensor]:
    def add_noise(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = _bound(alpha, output.size(1) * output.size(2))
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    return add_noise


@functools.lru_cache
def _bound(alpha: float, num_values: int) -> float:
    """The largest noise, computed in fp32 as the original does: its last bit decides the last bits of the noise."""
    bound: float = (alpha / torch.sqrt(torch.tensor(num_values, device="cpu"))).item()
    return bound


@contextmanager
def overflow_detection(model: nn.Module) -> Iterator[None]:
    """Stops a run with a report of the last layers' values when an activation or a weight is NaN or infinite."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: set(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for module, hooks in before.items():
            for key in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[key]


def align_special_tokens(model: nn.Module, processing_class: object) -> dict[str, int]:
    """Sets pad, bos and eos of a model's configuration to the tokenizer's, where the tokenizer has them.

    Further end tokens that the configuration lists stay. Returns what was changed. Not undone after training: the
    saved model must know the tokens it was trained with.
    """
    is_processor = is_instance_of(processing_class, "transformers.processing_utils", "ProcessorMixin")
    tokenizer = getattr(processing_class, "tokenizer", None) if is_processor else processing_class
    settings: Any = getattr(model, "config", None)  # of the user's model
    is_tokenizer = is_instance_of(tokenizer, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")
    if not (is_processor or is_tokenizer) or not hasattr(settings, "get_text_config"):
        return {}
    configs = [settings.get_text_config(), getattr(model, "generation_config", None)]
    changed = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name, None)
        for config, keeps_several in zip(configs, (False, True), strict=True):
            if token is not None and config is not None and _align(config, name, token, keeps_several=keeps_several):
                changed[name] = token
    if changed:
        logger.warning("The model's special tokens now follow the tokenizer's: %s.", changed)
    return changed


def _align(config: object, name: str, token: int, *, keeps_several: bool) -> bool:
    """Sets one token; an eos entry that is (or may become) a list keeps its other members."""
    before = getattr(config, name, None)
    listed = before if isinstance(before, list) else [before]
    if token in listed:
        return False
    is_list = name == "eos_token_id" and (keeps_several or isinstance(before, list))
    setattr(config, name, [token, *(t for t in listed if t is not None)] if is_list else token)
    return True


# -- the state that a recurrent model hands from one batch to the next (past_index) ------------------------------------


class RecurrentForward:
    """Runs a batch through a model with a state (`mems`) that the one before left at `past_index` of its output."""

    def __init__(self, past_index: int) -> None:
        self._past_index = past_index
        self._past: Any = None

    def __call__(self, model: Model, inputs: Batch) -> Any:
        """Returns the model's output, and keeps its state."""
        if self._past is not None:
            inputs = {**inputs, "mems": self._past}
        outputs = model(**inputs)
        self._past = outputs[self._past_index]
        return outputs

    def fresh(self) -> RecurrentForward:
        """The same without a state: for a new epoch, or for an evaluation."""
        return RecurrentForward(self._past_index)
