"""Limits of optimizers that the arguments show: reported before step 1, with the cure.

A limit takes the optimizer's name and the arguments and returns a message or None; `optimizer_table.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainwright.config import resolve

if TYPE_CHECKING:
    from trainwright.config.protocol import Arguments

Limit = Callable[[str, "Arguments"], "str | None"]


def no_accumulation(name: str, args: Arguments) -> str | None:
    """Reports gradient accumulation: the optimizer updates weights in each backward pass."""
    count = resolve.micro_batches(args)
    if count == 1:
        return None
    return (
        f"optim={name!r} updates the weights during each backward pass, so gradients cannot be accumulated, and "
        f"gradient_accumulation_steps={count} asks for it. Set it to 1 and raise per_device_train_batch_size, or "
        f"choose another optimizer{_without_layers(name)}."
    )


def no_fp16(name: str, args: Arguments) -> str | None:
    """Reports fp16: gradients are used before the scaler unscales them."""
    if not args.fp16:
        return None
    return (
        f"optim={name!r} updates the weights during the backward pass, before a gradient scaler can take its scale "
        "out of the gradients, and fp16=True scales them. Set bf16=True instead."
    )


def one_process(name: str, args: Arguments) -> str | None:
    """Reports a run of several processes: gradients are used before they are averaged."""
    mode = getattr(args.parallel_mode, "value", args.parallel_mode)
    if mode != "distributed":
        return None
    return (
        f"optim={name!r} updates the weights during the backward pass, before the gradients of several processes are "
        f"averaged. Train with one process, or choose another optimizer{_without_layers(name)}."
    )


def needs_cuda(name: str, args: Arguments) -> str | None:
    """Reports a device other than CUDA."""
    if args.device.type == "cuda":
        return None
    instead = {"adalomo": "lomo"}.get(name, name.replace("_8bit", ""))
    return (
        f"optim={name!r} runs on CUDA devices only, and this run is on {str(args.device)!r}. "
        f"optim={instead!r} runs everywhere."
    )


def whole_warmup(name: str, args: Arguments) -> str | None:
    """Reports a warm-up given as a share of an unknown number of steps."""
    if args.warmup_steps == int(args.warmup_steps) or args.max_steps > 0:
        return None
    return (
        f"warmup_steps={args.warmup_steps} is a share of all steps, and optim={name!r}, which warms up by itself, must "
        "know the number of steps when it is made. Give warmup_steps as a whole number, or set max_steps."
    )


def _without_layers(name: str) -> str:
    return f", for example {name.removesuffix('_layerwise')!r}" if name.endswith("_layerwise") else ""
