"""Train a small vision transformer from scratch to read handwritten digits: 1,797 images of 8 x 8 from scikit-learn.

python examples/image_classification.py --num_train_epochs 20
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from _common import held_out, package_directory, train_and_evaluate
from transformers import ViTConfig, ViTForImageClassification

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/image_classification",
    "num_train_epochs": 15,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 128,
    "learning_rate": 2e-3,
    "warmup_steps": 0.1,
    "logging_strategy": "epoch",
    "save_strategy": "best",
    "eval_strategy": "epoch",
    "metric_for_best_model": "accuracy",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
    "lr_scheduler_type": "cosine",
}


@dataclass
class ModelArguments:
    hidden_size: int = field(default=48, metadata={"help": "Width of the model."})
    num_layers: int = field(default=3, metadata={"help": "Layers of the model."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    train_rows, eval_rows = held_out(digits(), num_train=1437, num_eval=360)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_layers,
        num_attention_heads=4,
        intermediate_size=2 * model_args.hidden_size,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=accuracy,
    )
    train_and_evaluate(trainer, "accuracy", "loss")


def digits() -> list[dict[str, torch.Tensor]]:
    """Each image as a tensor of one channel, with values from -1 to 1, and the digit that it shows."""
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
