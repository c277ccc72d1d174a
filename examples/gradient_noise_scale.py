"""An extension that estimates the gradient noise scale: up to which batch size larger batches still pay off.

The simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1) is tr(Sigma) / |G|^2: the variance of
the gradients of single samples, divided by the squared norm of the true gradient G. The gradients of a small batch (the
first micro-batch of a step) and of a big one (all of the step) have the expected squared norms

    E |G_small|^2 = |G|^2 + tr(Sigma) / B_small        E |G_big|^2 = |G|^2 + tr(Sigma) / B_big

so the two unknowns follow from both. Single estimates are noisy, and a quotient of averages is not the average of
quotients: both are averaged over steps, and divided only for the log.

    python examples/gradient_noise_scale.py --gradient_accumulation_steps 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import held_out, package_directory, train_and_evaluate
from torch import nn

from trainwright import (
    Decision,
    EvalPrediction,
    Extension,
    HfArgumentParser,
    MicroBatch,
    StepFacts,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEMO_SETTINGS = {
    "output_dir": "runs/gradient_noise_scale",
    "num_train_epochs": 15,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 128,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-3,
    "logging_strategy": "epoch",
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "save_total_limit": 1,
}


@dataclass
class OwnArguments:
    decay: float = field(default=0.99, metadata={"help": "Share of the averages that stays at each step."})


class GradientNoiseScale(Extension):
    """Logs `gradient_noise_scale`, in samples.

    Nothing is read back from the device between two logs. In several processes each one has its own small batch, and
    the main process logs its own estimate.

    Args:
        decay: share of the averages that stays at each step.

    Attributes:
        averages: of |G|^2 and tr(Sigma), and their weight, on the device: shape (3,). A step whose gradients are not
            finite leaves them as they are.
    """

    name = "gradient_noise_scale"
    order = -30  # it reads the gradients of a step before the guard may refuse the step

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.averages = torch.zeros(3, dtype=torch.float64)
        self._parameters: list[nn.Parameter] = []
        self._num_processes = 1
        self._window_size = 0  # samples of this process
        self._small_size = 0
        self._num_micro_batches = 0
        self._small: torch.Tensor | None = None  # squared norm of the mean gradient of the first micro-batch

    def open(self, run: Any) -> None:
        self.averages = torch.zeros(3, dtype=torch.float64)

    def begin(self, run: Any) -> None:
        if run.plan.micro_batches < 2:
            raise ValueError(
                "The noise scale needs a second micro-batch: set gradient_accumulation_steps to 2 or more."
            )
        self._parameters = [p for p in run.setup.model.parameters() if p.requires_grad]
        self._num_processes = run.setup.engine.num_replicas
        self.averages = self.averages.to(run.setup.engine.device)

    def window(self, batches: Sequence[Any]) -> None:
        self._window_size = sum(len(batch["labels"]) for batch in batches)

    def micro_batch(self, batch: MicroBatch) -> None:
        """Before the second backward pass the gradients are those of the first micro-batch alone."""
        if self._num_micro_batches == 0:
            self._small_size = len(batch.inputs["labels"])
        elif self._num_micro_batches == 1:
            share = self._small_size / self._window_size  # its loss is weighed by it
            self._small = squared_norm(self._parameters) / share**2
        self._num_micro_batches += 1

    def decide(self, facts: StepFacts) -> Decision:
        """All gradients are there; where they were clipped, their norm before that is known."""
        small_size = self._small_size
        big_size = self._window_size * self._num_processes
        small = self._small
        self._end_window()
        if small is None or small_size == big_size:  # the last window of an epoch may have one micro-batch
            return Decision.APPLY
        if facts.grad_norm is None:
            big = squared_norm(self._parameters)
        else:
            big = torch.as_tensor(facts.grad_norm, device=small.device).double() ** 2
        true_gradient = (big_size * big - small_size * small) / (big_size - small_size)
        noise = (small - big) / (1 / small_size - 1 / big_size)
        new = torch.stack([true_gradient, noise, torch.ones_like(noise)])
        updated = self.decay * self.averages + (1 - self.decay) * new
        self.averages = torch.where(new.isfinite().all(), updated, self.averages)
        return Decision.APPLY

    def log(self) -> dict[str, float]:
        true_gradient, noise, weight = self.averages.tolist()
        if weight == 0 or true_gradient <= 0:  # too few steps: an estimate may be negative, its mean is not
            return {}
        return {"gradient_noise_scale": noise / true_gradient}

    def mark(self) -> torch.Tensor:
        return self.averages  # never changed in place, so a mark needs no copy

    def rewind(self, mark: torch.Tensor) -> None:
        self.averages = mark
        self._end_window()

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = state["averages"]

    def close(self) -> None:
        self._parameters = []
        self._end_window()

    def _end_window(self) -> None:
        self._num_micro_batches = 0
        self._small = None


def squared_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Returns the squared norm of the gradients, a scalar on their device; nothing is read back."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients).double() ** 2


class Reader(nn.Module):
    """Guesses the digit that an image of 8 x 8 shows."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 10))

    def forward(self, image: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(image)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = HfArgumentParser((OwnArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    own, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    train_rows, eval_rows = held_out(digits(), num_train=1437, num_eval=360)
    trainer = Trainer(
        model=Reader(),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=accuracy,
    )
    trainer.add_extension(GradientNoiseScale(own.decay))
    train_and_evaluate(trainer, "accuracy", "loss")
    found = [entry for entry in trainer.state.log_history if "gradient_noise_scale" in entry]
    if found and trainer.is_world_process_zero():
        scale = found[-1]["gradient_noise_scale"]
        print(f"Noise scale at the end: {scale:.0f} samples; a step has {trainer_batch(trainer)}")


def trainer_batch(trainer: Trainer) -> int:
    """Returns the samples of one optimizer step, over all processes."""
    args: Any = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def digits() -> list[dict[str, torch.Tensor]]:
    """1,797 images of scikit-learn, each as 64 values from -1 to 1, and the digit that it shows."""
    package_directory("sklearn", install="python -m pip install scikit-learn")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
    rows = zip(images, data.target, strict=True)
    return [{"image": image, "labels": torch.tensor(int(y))} for image, y in rows]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
