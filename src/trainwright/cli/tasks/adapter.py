"""LoRA adapters of the package peft on a model, and weights loaded in 4 or 8 bits."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from trainwright._types import JSONObject, is_instance_of
from trainwright.checkpoint.weights import keep_generation
from trainwright.cli.recipe.schema import LoraPart
from trainwright.cli.tasks.source import TaskSource, first_line
from trainwright.distributed.device import accelerator, placed, supports_bf16
from trainwright.errors import MissingPackageError, needs_package
from trainwright.support import model_facts

ALL_LINEAR = "all-linear"
FIRST_ON_CPU = Version("0.46")  # of bitsandbytes, with 4-bit weights
NEEDS_PEFT = "lora needs the package peft: pip install peft"


def find_quantization_problem(bits: str) -> str | None:
    """Returns why weights cannot be loaded in 4 or 8 bits here, in a sentence; None if they can."""
    try:
        version = Version(metadata.version("bitsandbytes"))
    except metadata.PackageNotFoundError:
        return f"{bits} needs the package bitsandbytes: pip install bitsandbytes"
    if accelerator() is None and version < FIRST_ON_CPU:
        return (
            f"{bits} needs a GPU with bitsandbytes {version}, and this machine has none. Take the entry out, or for a "
            "trial on the CPU install a newer one: pip install -U bitsandbytes"
        )
    return None


def quantized(bits: str | None) -> JSONObject:
    """Returns the arguments of `from_pretrained` that load weights in 4 or 8 bits; {} if not requested."""
    if bits is None:
        return {}
    problem = find_quantization_problem(bits)
    if problem is not None:
        raise MissingPackageError(f"model.quantization: {problem}")
    from transformers import BitsAndBytesConfig

    kind: Any = BitsAndBytesConfig
    if bits == "8bit":
        return {"quantization_config": kind(load_in_8bit=True)}
    has_bf16 = supports_bf16(placed(accelerator(), index=0), emulated=True)
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    return {"quantization_config": kind(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **settings)}


def with_adapter(model: nn.Module, material: TaskSource) -> nn.Module:
    """Puts the adapter of the recipe on a model; only it, and a new head, are trained."""
    with needs_package(NEEDS_PEFT):
        from peft import get_peft_model, prepare_model_for_kbit_training
    config = make_lora_config(model, material)
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of transformers about files read by peft
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        material.wrong(f"no adapter can be made: {first_line(error)}", "lora", "target_modules")
    return adapted


def make_lora_config(model: nn.Module, material: TaskSource) -> Any:
    """Returns the configuration of peft for the adapter of the recipe."""
    with needs_package(NEEDS_PEFT):
        from peft import LoraConfig
    part = material.recipe.lora
    assert part is not None
    targets: str | list[str] = part.target_modules
    parameters: list[str] = []
    if targets == ALL_LINEAR and model_facts.expert_layers(model):
        targets, parameters = find_targets(model)
    return LoraConfig(
        r=part.r,
        lora_alpha=part.alpha,
        lora_dropout=part.dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        modules_to_save=part.modules_to_save,
        use_dora=part.use_dora,
        use_rslora=part.use_rslora,
        task_type=material.recipe.spec.adapter,
    )


def find_targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """Returns what "all-linear" means for a mixture of experts: its linear layers, and the parameters of experts.

    The routers are left out: adapters on them change which expert a token goes to. They are adapted if
    `target_modules` names them.
    """
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    routers = model_facts.router_layers(model)
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in routers
    ]
    parameters = [
        f"{name}.{own}"
        for name, layer in model_facts.expert_layers(model).items()
        for own, parameter in layer.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]
    return layers, parameters


def described(part: LoraPart) -> str:
    """Describes an adapter in a few words."""
    named = part.target_modules if isinstance(part.target_modules, str) else ", ".join(part.target_modules)
    if part.use_dora:
        kind = "DoRA"
    elif part.use_rslora:
        kind = "rsLoRA"
    else:
        kind = "LoRA"
    return f"{kind} of rank {part.r} on {named}"


def save_base_config(model: nn.Module, folder: Path) -> None:
    """Writes the base model's settings next to an adapter; a later merge reads class, labels and end tokens there."""
    if is_instance_of(model, "peft", "PeftModel"):
        base: Any = model.get_base_model()  # type: ignore[operator]
        config = base.config
        config.architectures = [type(base).__name__]
        config.save_pretrained(folder)
        if getattr(base, "generation_config", None) is not None:
            with keep_generation(base, folder):
                base.generation_config.save_pretrained(folder)
