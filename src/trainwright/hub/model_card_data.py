"""Collects the contents of a model card from a trainer's objects: names, settings, results, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.config.protocol import Arguments
from trainwright.hub.model_card import CardContent, evaluations, listed
from trainwright.hub.model_card_plot import losses_of
from trainwright.journal.environment_info import installed

PACKAGES = ("trainwright", "transformers", "torch", "datasets", "tokenizers", "peft")
SETTINGS = (
    "learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size", "seed",
    "gradient_accumulation_steps", "optim", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps",
    "weight_decay", "max_grad_norm", "label_smoothing_factor",
)  # fmt: skip


def collect(
    args: Arguments,
    model: nn.Module,
    dataset: object,
    log_history: Sequence[Mapping[str, Any]],
    given: Mapping[str, Any],
) -> CardContent:
    """Collects the contents of the card; `given` values take precedence over found ones."""
    history = evaluations(log_history)
    marks = listed(given.get("tags")) + listed(getattr(model, "model_tags", None))
    found = {
        "model_name": Path(str(args.output_dir)).resolve().name,
        "base_model": base_of(model),
        "dataset": name_of(dataset),
        "tags": marks,
    }
    chosen = {**found, **{name: value for name, value in given.items() if value is not None and name != "tags"}}
    return CardContent(
        **chosen,
        results=results(history),
        history=history,
        losses=losses_of(log_history),
        settings=settings(args),
        versions={name: version for name in PACKAGES if (version := installed(name)) is not None},
        is_adapter=hasattr(model, "peft_config"),
    )


def base_of(model: nn.Module) -> str | None:
    """Returns the repository that the model was loaded from; None for a local directory."""
    adapters = getattr(model, "peft_config", None)
    config = next(iter(adapters.values())) if isinstance(adapters, Mapping) and adapters else None
    name = getattr(config, "base_model_name_or_path", None) or getattr(
        getattr(model, "config", None), "_name_or_path", None
    )
    return name if isinstance(name, str) and name and not Path(name).exists() and name.count("/") <= 1 else None


def name_of(dataset: object) -> str | None:
    """Returns the name of a dataset of the package datasets; None for others."""
    return getattr(getattr(dataset, "info", None), "dataset_name", None)


def settings(args: Arguments) -> dict[str, object]:
    """Returns the hyperparameters of the card."""
    found = ((name, getattr(args, name)) for name in SETTINGS if hasattr(args, name))
    values = {name: getattr(value, "value", value) for name, value in found}
    mixed = args.mixed_precision
    return {**values, "precision": "full" if mixed == "no" else f"{mixed} (mixed)", "processes": args.world_size}


def results(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the numbers of the last evaluation."""
    last = history[-1] if history else {}
    return {
        name: value for name, value in last.items()
        if name not in ("step", "epoch", "training loss") and isinstance(value, (int, float))
    }  # fmt: skip
