"""Mixed precision through the trainer: what runs in which type, what is held when a step is skipped, what is undone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Trainer, TrainerCallback, TrainingArguments
from trainwright.errors import ModelError


class Probe(nn.Module):
    """Remembers the types that it computed in; a sample marked `burst` makes the gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.types: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, burst: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        self.types.append(logits.dtype)
        loss = nn.functional.cross_entropy(logits.float(), labels) * (1 + burst.max() * 1e35)
        return {"loss": loss, "logits": logits}


def samples(*, burst_at: int | None = None) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator), "labels": i % 2, "burst": float(i == burst_at)} for i in range(24)
    ]


def trainer(folder: Path, cls: type[Trainer] = Trainer, data: Any = None, callbacks: Any = None, **how: Any) -> Trainer:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "num_train_epochs": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
    }
    torch.manual_seed(0)
    args = TrainingArguments(str(folder), **settings | how)
    data = samples() if data is None else data
    return cls(Probe(), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_runs_in_the_type_and_the_weights_stay_fp32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    run = trainer(tmp_path, **{name: True})
    run.train()
    assert set(run.model.types) == {dtype}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_evaluation_outside_of_training_runs_in_type_too_and_hands_over_fp32(tmp_path: Path) -> None:
    run = trainer(tmp_path, bf16=True)
    seen: list[torch.dtype] = []
    run.preprocess_logits_for_metrics = lambda logits, labels: seen.append(logits.dtype) or logits
    run.predict(samples())
    assert set(run.model.types) == {torch.bfloat16}
    assert set(seen) == {torch.float32}


def test_afterwards_the_model_is_as_it_was(tmp_path: Path) -> None:
    run = trainer(tmp_path, bf16=True)
    run.train()
    run.evaluate()
    assert "forward" not in vars(run.model)


@pytest.mark.parametrize("looks", [False, True], ids=["the-models-own-loss", "a-loss-of-ones-own"])
def test_outputs_are_copied_to_fp32_only_if_they_are_read(looks: bool, tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            seen.append(outputs["logits"].dtype)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    run = trainer(tmp_path, cls=Own if looks else Trainer, bf16=True)
    if not looks:
        run.model.register_forward_hook(lambda module, inputs, output: seen.append(output["logits"].dtype))
    run.train()
    assert set(seen) == {torch.float32 if looks else torch.bfloat16}


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])
        self.weights.append(kwargs["model"].layer.weight.detach().clone())


def test_a_skipped_step_holds_the_weights_and_the_schedule(tmp_path: Path) -> None:
    quiet = Watch()
    burst = Watch()
    trainer(tmp_path, fp16=True, callbacks=[quiet]).train()
    trainer(tmp_path, fp16=True, callbacks=[burst], data=samples(burst_at=9)).train()  # in the third batch
    assert burst.rates[:2] == quiet.rates[:2]
    assert burst.rates[2] == burst.rates[1]
    assert burst.rates[3:] == quiet.rates[2:-1]
    assert torch.equal(burst.weights[2], burst.weights[1])
    assert not torch.equal(burst.weights[3], burst.weights[2])


def test_the_scaler_is_saved_and_loaded(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", fp16=True, save_strategy="steps", save_steps=3, data=samples(burst_at=9))
    whole.train()
    again = trainer(tmp_path / "whole", fp16=True, save_strategy="steps", save_steps=3, data=samples(burst_at=9))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(again.model.layer.weight, whole.model.layer.weight)
    assert again.accelerator.scaler.get_scale() == whole.accelerator.scaler.get_scale() < 65536.0


def test_fp16_weights_with_fp16_are_refused_before_the_first_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, fp16=True)
    run.model.half()
    with pytest.raises(ModelError, match=r"fp16=True.*layer\.weight.*torch\.float32"):
        run.train()
    assert run.model.types == []


def test_quantised_weights_without_an_adapter_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.model.is_quantized = True
    with pytest.raises(ModelError, match=r"quantised.*adapter"):
        run.train()
