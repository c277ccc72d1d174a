"""The model as a run trains it: with the changes that the arguments ask for, undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from trainwright._types import Model
from trainwright.config import resolve
from trainwright.config.fields import get_value
from trainwright.distributed.device import get_kind, pins_memory_here
from trainwright.engine.base import Engine
from trainwright.support.replaced import current


@contextmanager
def patched(
    args: Any,
    model: Model,
    engine: Engine,
    *,
    keeps_outputs: bool,
    noise: AbstractContextManager[None],
    is_alone: bool = False,
) -> Iterator[None]:
    """Returns the model as used in training: with the changes that the arguments ask for, and in mixed precision.

    `noise` is the context in which the trainer adds noise to its embeddings. With `is_alone` the other processes do
    not come here, so nothing is agreed with them.
    """
    from trainwright.support import patches

    with ExitStack() as stack:
        enter = stack.enter_context
        if args.use_liger_kernel:
            current("apply_liger_kernel", patches.apply_liger_kernel)(model, args.liger_kernel_config)
        if get_value(args, "activation_checkpointing"):
            options = get_value(args, "activation_checkpointing_kwargs")
            enter(patches.checkpointed_activations(model, options, pins_memory=pins_memory_here()))
        if resolve.compiles_blocks(args):
            backend = args.torch_compile_backend
            mode = args.torch_compile_mode
            enter(patches.compiled_blocks(model, backend=backend, mode=mode))
        enter(noise)
        if (kernel := get_value(args, "loss_kernel")) is not None:
            from trainwright.support.loss_kernels import without_logits

            runs_triton = get_kind(engine.device).runs_triton
            enter(
                without_logits(
                    model,
                    kernel,
                    keeps_outputs=keeps_outputs,
                    obstacle=engine.hides_output_layer,
                    runs_triton=runs_triton,
                    **({} if is_alone else {"agree": engine.agree}),
                )
            )
        if "underflow_overflow" in args.debug:
            enter(patches.overflow_detection(model))
        enter(engine.mixed_precision(model, keeps_outputs=keeps_outputs))
        yield
