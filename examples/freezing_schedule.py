"""An extension that freezes the lower layers of a model one after the other, and so saves their backward passes.

A simple form of FreezeOut (Brock et al. 2017, arXiv:1706.04983): the first layers settle early, so each module gets a
step after which it is trained no further. From then on its parameters get no gradients, and the optimizer leaves them
alone.

    python examples/freezing_schedule.py --freeze vit.embeddings=60 --freeze vit.layers.0=120
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import held_out, package_directory, train_and_evaluate
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from trainwright import EvalPrediction, Extension, HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/freezing_schedule",
    "num_train_epochs": 12,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 128,
    "learning_rate": 2e-3,
    "warmup_steps": 0.1,
    "logging_strategy": "epoch",
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "save_total_limit": 1,
}
MODULES = ("vit.embeddings", "vit.layers.0", "vit.layers.1")


@dataclass
class OwnArguments:
    freeze: list[str] | None = field(
        default=None,
        metadata={
            "help": "NAME=STEP: modules whose name begins with NAME are not trained after STEP. Default: all but the "
            "last layer, one after the other, from the middle of the run on."
        },
    )


class FreezingSchedule(Extension):
    """Freezes modules after steps, and logs `trainable_parameters`.

    Args:
        steps: prefix of module names -> the last step in which their parameters are trained.

    Attributes:
        num_trainable: parameters that are trained now.
    """

    name = "freezing_schedule"

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.steps = dict(steps)
        self.num_trainable = 0
        self._frozen: list[nn.Parameter] = []
        self._due: dict[int, list[nn.Parameter]] = {}

    def begin(self, run: Any) -> None:
        """Finds the parameters; after a resume those whose step is over are frozen at once."""
        parameters = {name: p for name, p in plain(run.setup.model).named_parameters() if p.requires_grad}
        self.num_trainable = sum(parameter.numel() for parameter in parameters.values())
        self._due = {}
        for prefix, step in self.steps.items():
            found = [name for name in parameters if name == prefix or name.startswith(f"{prefix}.")]
            if not found:
                raise ValueError(
                    f"No trainable parameter is in a module named {prefix!r}. There are: {names(parameters)}"
                )
            self._due.setdefault(step, []).extend(parameters[name] for name in found)
        for step in sorted(self._due):
            if step <= run.progress.state.global_step:
                self._freeze(self._due[step])

    def after_step(self, run: Any) -> None:
        """The gradients of the step are cleared already, so the optimizer finds none for a frozen parameter."""
        due = self._due.get(run.progress.state.global_step)
        if due is not None:
            self._freeze(due)

    def log(self) -> dict[str, float]:
        return {"trainable_parameters": self.num_trainable}

    def close(self) -> None:
        """All are trainable again: the next run, or another trainer, finds the model as this run did."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        self._due = {}

    def _freeze(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:  # two prefixes may name one
                parameter.requires_grad_(False)
                self.num_trainable -= parameter.numel()
                self._frozen.append(parameter)


def plain(model: nn.Module) -> nn.Module:
    """Returns the model without the wrapper for several processes."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def names(parameters: Mapping[str, nn.Parameter]) -> str:
    """Returns the names of the modules that have parameters, two levels deep."""
    return ", ".join(dict.fromkeys(".".join(name.split(".")[:3]) for name in parameters))


def steps_of(wanted: list[str] | None, num_steps: int) -> dict[str, int]:
    """Returns the schedule that the command line asks for."""
    if wanted is None:
        return {name: num_steps * (5 + number) // 10 for number, name in enumerate(MODULES)}
    pairs = [text.partition("=") for text in wanted]
    return {name: int(step) for name, _, step in pairs}


def main() -> None:
    parser = HfArgumentParser((OwnArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    own, args = parser.parse_args_into_dataclasses()
    if args.world_size > 1:
        args.ddp_find_unused_parameters = True  # frozen parameters have no gradient to average over processes
    set_seed(args.seed)
    train_rows, eval_rows = held_out(digits(), num_train=1437, num_eval=360)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
    )
    model = ViTForImageClassification(config)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=accuracy,
    )
    samples_of_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * len(train_rows) / samples_of_step)
    trainer.add_extension(FreezingSchedule(steps_of(own.freeze, num_steps)))
    train_and_evaluate(trainer, "accuracy", "loss")


def digits() -> list[dict[str, torch.Tensor]]:
    """1,797 images of scikit-learn, each of one channel with values from -1 to 1, and the digit that it shows."""
    package_directory("sklearn", install="python -m pip install scikit-learn")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    rows = zip(images, data.target, strict=True)
    return [{"pixel_values": image, "labels": torch.tensor(int(y))} for image, y in rows]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
