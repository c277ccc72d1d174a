"""A script of v4.34 runs as it is, and arguments made by transformers 5.23 mean here what they mean there."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers

from trainwright import Trainer, TrainingArguments
from trainwright.config import resolve
from trainwright.config.plans import StepPlan

from .._support import forked
from ..effects.bench import Toy, are_equal, samples, seeded, weights
from ..parity.sides import Weights

SCRIPT = """
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from trainwright import (
    DataCollatorWithPadding, EarlyStoppingCallback, EvalPrediction, HfArgumentParser, Trainer, TrainingArguments,
    get_last_checkpoint, set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16, metadata={"help": "Width of the model."})
    cache_dir: Optional[str] = field(default=None, metadata={"help": "Where to keep downloads."})


def make_tokenizer():
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film", "very"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def compute_metrics(p: EvalPrediction):
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    assert p.inputs is None or p.inputs.shape[0] == len(p.label_ids)
    return {"accuracy": (np.argmax(preds, axis=1) == p.label_ids).astype(np.float32).mean().item()}


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    logger.setLevel(training_args.get_process_log_level())
    logger.warning(
        f"Process rank: {training_args.local_rank}, device: {training_args.device}, n_gpu: {training_args.n_gpu}"
        + f"distributed training: {bool(training_args.local_rank != -1)}, 16-bits training: {training_args.fp16}"
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train and not training_args.overwrite_output_dir:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)

    tokenizer = make_tokenizer()
    with training_args.main_process_first(desc="tokenization"):
        texts = [("very " * (i % 5) + ("good" if i % 2 else "bad") + " film", i % 2) for i in range(24)]
        rows = [{**tokenizer(text, return_token_type_ids=False), "label": label} for text, label in texts]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=model_args.hidden_size, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=2,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=rows if training_args.do_train else None,
        eval_dataset=rows[:10] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        tokenizer=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=None),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    )
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(rows)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=rows[:10])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        predictions = trainer.predict(rows, metric_key_prefix="predict").predictions
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predict_results.txt"), "w") as writer:
                writer.write("\\n".join(str(item) for item in np.argmax(predictions, axis=1)))


if __name__ == "__main__":
    main()
"""
COMMAND = """
--do_train --do_eval --do_predict --overwrite_output_dir --evaluation_strategy steps --eval_steps 3 --save_steps 3
--no_cuda --warmup_ratio 0.2 --per_gpu_train_batch_size 4 --per_gpu_eval_batch_size 5 --group_by_length
--logging_dir runs --logging_steps 1 --save_safetensors True --include_inputs_for_metrics True --adafactor False
--num_train_epochs 2 --learning_rate 1e-2 --load_best_model_at_end --metric_for_best_model accuracy
--save_total_limit 2 --seed 7 --use_legacy_prediction_loop False --half_precision_backend auto --hidden_size 16
"""
REPLACED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "include_inputs_for_metrics": "include_for_metrics=['inputs']",
    "adafactor": "optim='adafactor'",
    "half_precision_backend": "fp16=True or bf16=True",
}
HONOURED = ("overwrite_output_dir", "logging_dir")


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The script as a user runs it, every warning shown as often as it comes."""
    (folder / "run_old.py").write_text(SCRIPT, encoding="utf-8")
    always = "import runpy, warnings; warnings.simplefilter('always'); runpy.run_path('run_old.py', None, '__main__')"
    return forked.run(["-c", always, *words], cwd=folder)


@pytest.mark.process
def test_a_script_of_v4_34_trains(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--output_dir", "out", *COMMAND.split())
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    results = json.loads((out / "all_results.json").read_text())
    assert {"train_loss", "train_samples", "eval_loss", "eval_accuracy"} <= set(results)
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 12
    assert [entry["step"] for entry in state["log_history"] if "eval_accuracy" in entry] == [3, 6, 9, 12]
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    assert rates[:4] == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2])  # 12 x 0.2 steps of warm-up, rounded up
    assert (out / "model.safetensors").is_file()
    assert (out / "tokenizer.json").is_file()
    assert len(list(out.glob("checkpoint-*/model.safetensors"))) == 2
    assert len((out / "predict_results.txt").read_text().split()) == 24

    for name, replacement in REPLACED.items():
        told = [line for line in done.stderr.splitlines() if f"{name} is an older name: " in line]
        assert len(told) == 1, name
        assert replacement in told[0]
    assert done.stderr.count("LegacyNameWarning: ") == len(REPLACED) + 1
    assert done.stderr.count("Trainer(tokenizer=...) is now Trainer(processing_class=...)") == 1
    assert not [name for name in HONOURED if f"{name} is an older name" in done.stderr]
    assert "logging_dir has no effect without report_to='tensorboard'" in done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_the_same_script_reads_a_json_file(tmp_path: Path) -> None:
    settings = {
        "output_dir": "out",
        "do_train": True,
        "evaluation_strategy": "epoch",
        "metric_for_best_model": "loss",
        "no_cuda": True,
        "max_steps": 1,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    done = run_script(tmp_path, "settings.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


# -- arguments that transformers made ---------------------------------------------------------------------------------


@dataclass
class Theirs(transformers.TrainingArguments):
    """As a library on top of transformers has it: fields of its own, other defaults, a dict from a string."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]  # type: ignore[misc]
    learning_rate: float = field(default=2e-2, metadata={"help": "Peak rate."})
    logging_steps: float = field(default=2, metadata={"help": "Steps between logs."})
    bf16: bool | None = field(default=None, metadata={"help": "True where fp16 is not."})
    max_length: int | None = field(default=1024, metadata={"help": "Tokens kept of a sample."})
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "For from_pretrained."})

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()


DEFAULTS = {"learning_rate": 2e-2, "logging_steps": 2, "bf16": True}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 1.5},
    {"max_steps": 5, "max_grad_norm": 0.5, "warmup_steps": 0.3, "lr_scheduler_type": "cosine"},
    {"optim": "adamw_torch", "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1, "learning_rate": 3e-2},
    {"bf16": True, "bf16_full_eval": True, "eval_accumulation_steps": 3, "per_device_eval_batch_size": 3},
    {"torch_compile_backend": "eager", "torch_compile_mode": "default"},
    {"seed": 3, "data_seed": 5, "dataloader_drop_last": True, "dataloader_in_order": False},
    {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": True},
    {"accelerator_config": {"use_seedable_sampler": False, "non_blocking": True}},
    {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    {"save_total_limit": 2, "save_only_model": True, "save_strategy": "epoch"},
    {"include_for_metrics": ["loss"], "eval_do_concat_batches": False, "logging_nan_inf_filter": False},
    {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
]


def plans(args: Any) -> list[Any]:
    lengths = resolve.lengths(args, num_batches=6, num_examples=12, total_batch_size=args.train_batch_size)
    steps = StepPlan.from_values(lengths, micro_batches=resolve.micro_batches(args), max_grad_norm=args.max_grad_norm)
    return [
        steps,
        resolve.loader(args, batch_size=args.train_batch_size, seed=args.seed, is_training=True),
        resolve.loader(args, batch_size=args.eval_batch_size, seed=args.seed),
        resolve.engine(args),
        resolve.evaluation(args),
        resolve.checkpoint(args),
        Trainer.get_optimizer_cls_and_kwargs(args),
        args.get_warmup_steps(steps.max_steps),
    ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_arguments_of_transformers_resolve_to_the_same_plans(settings: dict[str, Any], tmp_path: Path) -> None:
    always = {"output_dir": str(tmp_path), "use_cpu": True}
    theirs = plans(transformers.TrainingArguments(**always, **settings))
    for ours, other in zip(plans(TrainingArguments(**always, **settings)), theirs, strict=True):
        assert ours == other
    theirs = plans(Theirs(**always, **settings))
    for ours, other in zip(plans(TrainingArguments(**{**always, **DEFAULTS, **settings})), theirs, strict=True):
        assert ours == other


def final_weights(args: Any) -> Weights:
    trainer = Trainer(seeded(lambda: Toy(dropout=0.3)), args, train_dataset=samples(), eval_dataset=samples())
    trainer.train()
    return weights(trainer.model)


TRAINED = [settings for settings in SETTINGS if not {"dataloader_num_workers", "torch_compile_backend"} & set(settings)]


@pytest.mark.parametrize("settings", TRAINED, ids=str)
def test_arguments_of_transformers_train_to_the_same_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    always = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    if "eval_strategy" in settings:
        always["save_strategy"] = "steps"
    ours = TrainingArguments(str(tmp_path / "ours"), **{**always, **DEFAULTS, **settings})
    theirs = Theirs(output_dir=str(tmp_path / "theirs"), **{**always, **settings}, model_init_kwargs='{"a": 1}')
    assert theirs.model_init_kwargs == {"a": 1}
    assert are_equal(final_weights(ours), final_weights(theirs))


def test_arguments_of_transformers_are_not_written_to(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, accelerator_config=SETTINGS[9]["accelerator_config"]
    )
    before = args.to_dict()
    final_weights(args)
    assert args.to_dict() == before
