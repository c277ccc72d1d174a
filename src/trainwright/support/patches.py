"""Changes to a model for one run: each is applied before it and undone after it if possible.

Activation checkpointing, compiled blocks, fused kernels (Liger), noise on embeddings (NEFTune), detection of overflow,
special tokens, state of recurrent models.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from trainwright._types import Batch, Model, is_instance_of
from trainwright.errors import ArgumentError, ModelError, needs_package
from trainwright.support.model_facts import core_model

logger = logging.getLogger(__name__)

Options: TypeAlias = dict[str, Any]  # keywords of torch's or transformers' checkpointing
Forward: TypeAlias = Callable[..., object]
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
ATTENTION = "attention"  # value of the option `save`


@contextmanager
def checkpointed_activations(model: nn.Module, options: Options | None, *, pins_memory: bool = False) -> Iterator[None]:
    """Turns checkpointing on for a run and off after it, unless the user had turned it on already.

    For a model without transformers' methods for it, the layers in its ModuleLists (or Sequentials, if it has no list)
    are checkpointed; without any it is a ModelError. `options` are `every_n_layers`, `offload`, `save`, and
    arguments of torch's `checkpoint`. `pins_memory`: offloaded activations are in pinned memory.
    """
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    was_on = getattr(model, f"is_{name}_checkpointing", False)  # asking by the older name warns
    rest = dict(options or {})
    layers = rest.pop("every_n_layers", 1)
    offload = rest.pop("offload", False)
    if (kept := rest.pop("save", None)) is not None:
        _check_kept(kept, rest)
        rest = {"use_reentrant": False, "context_fn": keeping_attention, **rest}
    if not hasattr(model, f"{name}_checkpointing_enable"):
        with _checkpointed_layers(model, rest, every_n_layers=layers, offload=offload, pins_memory=pins_memory):
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


def _check_kept(kept: object, options: Options) -> None:
    if kept != ATTENTION:
        raise ArgumentError(
            f"save={kept!r} in activation_checkpointing_kwargs; only save={ATTENTION!r} is known, which keeps the "
            "outputs of attention. Set it, or leave it out."
        )
    if "context_fn" in options:
        raise ArgumentError(
            "activation_checkpointing_kwargs has save and context_fn, and both choose which activations are kept. "
            "Remove one of them."
        )


def keeping_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a checkpointed layer's forward pass and of its recomputation, for torch's `checkpoint`.

    Outputs of attention kernels are kept: they take long to compute and little memory. All else is computed again.
    """
    return create_selective_checkpoint_contexts(_keeps_attention)  # type: ignore[no-untyped-call, no-any-return]


def _keeps_attention(context: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    name = (
        operation.name()
    )  # aten::_scaled_dot_product_flash_attention, flex_attention, flash_attn::_flash_attn_forward
    is_attention = "attention" in name or "flash_attn" in name
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _checkpointed_layers(
    model: nn.Module, options: Options, *, every_n_layers: int, offload: bool, pins_memory: bool
) -> Iterator[None]:
    layers = _find_layers(model)[::every_n_layers]
    if not layers:
        raise ModelError(
            f"activation_checkpointing=True, but {type(model).__name__} has no ModuleList or Sequential whose layers "
            "could be checkpointed. Keep its layers in one, or set activation_checkpointing=False."
        )
    options = {"use_reentrant": False, **options}
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, options, offload=offload, pins_memory=pins_memory)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed(forward: Forward, options: Options, *, offload: bool, pins_memory: bool) -> Forward:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: Any) -> object:  # keywords of the layer
        with save_on_cpu(pin_memory=pins_memory) if offload else nullcontext():
            return checkpoint(vars(run)["inner"], *args, **options, **kwargs)

    vars(run)["inner"] = forward  # compiled_blocks exchanges it
    return run


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of layers."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [module for module in model.modules() if type(module) is kind]
        inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
        layers = [layer for found in lists if id(found) not in inner for layer in found]
        if layers:
            return [layer for layer in layers if any(True for _ in layer.parameters())]
    return []


@contextmanager
def compiled_blocks(model: nn.Module, *, backend: str | None, mode: str | None) -> Iterator[None]:
    """Compiles the repeated blocks of a model while it lasts, each class of them once; evaluations run as they are.

    A block is compiled for the first shapes that it sees and, when others come, once more for any. Checkpointing of
    activations stays around it. A model without repeated blocks is compiled as a whole, with a warning.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        blocks = [model]
        logger.warning(
            'torch_compile="regional", and %s has no repeated blocks (several layers of one class in a ModuleList, a '
            "Sequential or another module). It is compiled as a whole.",
            type(model).__name__,
        )
    import torch._dynamo.config as compiler_settings

    compiled = {kind: _compiled(backend, mode) for kind in {type(block) for block in blocks}}
    with ExitStack() as stack:
        # DDP's optimizer would cut blocks at its buckets; that gradients of a block come together is enough.
        stack.enter_context(compiler_settings.patch(optimize_ddp=False))
        for block in blocks:
            _compile_block(block, compiled[type(block)], stack)
        yield


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns layers, made of modules, of which there are several of one class; the outermost ones."""
    layers = _find_layers(model)
    for found in (layers, [child for parent in model.modules() for child in parent.children()]):
        made = [layer for layer in found if any(layer.children()) and not isinstance(layer, NOT_CALLED)]
        counts = Counter(map(type, made))
        blocks = [layer for layer in made if counts[type(layer)] > 1]
        inner = {id(module) for block in blocks for module in block.modules() if module is not block}
        if blocks:
            return [block for block in blocks if id(block) not in inner]
    return []


def _compiled(backend: str | None, mode: str | None) -> tuple[Forward, Forward]:
    """A function that calls its first argument with the others, compiled for one shape and for any."""

    def call(function: Forward, *args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    # torch caches and counts compilations per code object, so a copy starts with an empty cache.
    own = FunctionType(call.__code__.replace(), globals())
    options: Options = {"backend": backend or "inductor", "mode": mode}
    return torch.compile(own, dynamic=False, **options), torch.compile(own, dynamic=True, **options)


def _compile_block(block: nn.Module, compiled: tuple[Forward, Forward], undo: ExitStack) -> None:
    first: list[torch.Size] | None = None

    def run(function: Forward, *args: object, **kwargs: Any) -> object:  # keywords of the layer
        nonlocal first
        shapes = [one.shape for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if first is None:
            first = shapes
        return compiled[shapes != first](function, *args, **kwargs)

    own: Any = vars(block).get("forward")  # the wrapper of _checkpointed, or another library's
    # The first of two passes may be without gradients, but it must be computed like the second.
    is_checkpointed = getattr(block, "gradient_checkpointing", False)
    plain: Any = own.inner if hasattr(own, "inner") else block.forward
    function = plain.__func__ if isinstance(plain, MethodType) else plain
    bound = (plain.__self__,) if isinstance(plain, MethodType) else ()

    @functools.wraps(plain)
    def forward(*args: object, **kwargs: Any) -> object:
        if not (block.training and (is_checkpointed or torch.is_grad_enabled())):
            return plain(*args, **kwargs)
        return run(function, *bound, *args, **kwargs)

    if hasattr(own, "inner"):
        undo.callback(setattr, own, "inner", plain)
        own.inner = forward
    else:
        undo.callback(setattr if own else delattr, block, "forward", *([own] if own else []))
        block.forward = forward


def read_attention(core: nn.Module) -> str | None:
    """Returns the attention implementation of a model of transformers that can be exchanged; None of another."""
    if not hasattr(core, "set_attn_implementation") or getattr(core.config, "output_attentions", False):
        return None
    name: object = getattr(core.config, "_attn_implementation", None)
    return name if isinstance(name, str) else None


@contextmanager
def with_attention(model: nn.Module, name: str | None) -> Iterator[None]:
    """Trains with an attention implementation of transformers while it lasts; None: with the model's own."""
    core: Any = core_model(model)
    before = read_attention(core)
    if name is None or before in (None, name):
        yield
        return
    core.set_attn_implementation(name)
    try:
        yield
    finally:
        core.set_attn_implementation(before)


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


def add_noise_to_embeddings(model: nn.Module, alpha: float) -> torch.utils.hooks.RemovableHandle:
    """Adds noise of at most `alpha / sqrt(tokens x dimensions)` to the input embeddings, in training mode only.

    Returns:
        The handle of the hook; `remove()` ends it.
    """
    find = getattr(core_model(model), "get_input_embeddings", None)
    if find is None:
        raise ModelError(
            f"neftune_noise_alpha={alpha} adds noise to the input embeddings, and {type(model).__name__} has no "
            "get_input_embeddings() to find them by. Define it, or leave neftune_noise_alpha unset."
        )
    handle: torch.utils.hooks.RemovableHandle = find().register_forward_hook(_noise(alpha))
    return handle


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

    handles: list[RemovableHandle] = []

    class Detection(DebugUnderflowOverflow):
        def register_forward_hook(self) -> None:
            handles.extend(module.register_forward_hook(self.forward_hook) for module in model.modules())

    Detection(model)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def align_special_tokens(model: nn.Module, processing_class: object) -> dict[str, int]:
    """Sets pad, bos and eos in a model's configuration to the tokenizer's, and says so. Returns the changes.

    Not undone after training: the saved model must know the tokens it was trained with.
    """
    changed = follow_tokenizer(model, processing_class)
    if changed:
        logger.warning("The model's special tokens now follow the tokenizer's: %s.", changed)
    return changed


def follow_tokenizer(model: nn.Module, processing_class: object) -> dict[str, int]:
    """Sets pad, bos and eos in a model's configuration to the tokenizer's, if the tokenizer has them.

    Further end tokens that the configuration lists stay. Returns the changes.
    """
    is_processor = is_instance_of(processing_class, "transformers.processing_utils", "ProcessorMixin")
    tokenizer = getattr(processing_class, "tokenizer", None) if is_processor else processing_class
    settings: Any = getattr(model, "config", None)
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
