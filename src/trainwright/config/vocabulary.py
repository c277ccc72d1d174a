"""Words that people and other libraries use for arguments. They only make suggestions, before spelling distance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainwright.errors import did_you_mean, nearest

# Word -> field of TrainingArguments.
FIELDS: dict[str, str] = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "amp": "bf16",
    "amsgrad": "optim_args",
    "batch": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "betas": "adam_beta1",
    "bfloat16": "bf16",
    "bs": "per_device_train_batch_size",
    "checkpoint_dir": "output_dir",
    "checkpoint_every": "save_steps",
    "checkpoint_path": "resume_from_checkpoint",
    "ckpt_path": "resume_from_checkpoint",
    "clip": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "clip_norm": "max_grad_norm",
    "compile": "torch_compile",
    "cpu": "use_cpu",
    "default_root_dir": "output_dir",
    "deterministic": "full_determinism",
    "ds_config": "deepspeed",
    "epoch": "num_train_epochs",
    "epochs": "num_train_epochs",
    "eps": "adam_epsilon",
    "epsilon": "adam_epsilon",
    "eval_batch": "per_device_eval_batch_size",
    "eval_bs": "per_device_eval_batch_size",
    "eval_every": "eval_steps",
    "eval_freq": "eval_steps",
    "eval_interval": "eval_steps",
    "float16": "fp16",
    "ga_steps": "gradient_accumulation_steps",
    "grad_acc": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_accumulation": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "grad_norm": "max_grad_norm",
    "gradient_accumulation": "gradient_accumulation_steps",
    "gradient_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "half": "fp16",
    "iterations": "max_steps",
    "iters": "max_steps",
    "label_smoothing": "label_smoothing_factor",
    "learning_rate_scheduler": "lr_scheduler_type",
    "log_dir": "output_dir",
    "log_every": "logging_steps",
    "log_every_n_steps": "logging_steps",
    "log_freq": "logging_steps",
    "log_interval": "logging_steps",
    "log_steps": "logging_steps",
    "logger": "report_to",
    "lr": "learning_rate",
    "lr_schedule": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "max_checkpoints": "save_total_limit",
    "max_epochs": "num_train_epochs",
    "max_iters": "max_steps",
    "max_norm": "max_grad_norm",
    "max_train_steps": "max_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "min_lr": "lr_scheduler_kwargs",
    "monitor": "metric_for_best_model",
    "n_epochs": "num_train_epochs",
    "name": "run_name",
    "num_epochs": "num_train_epochs",
    "num_steps": "max_steps",
    "num_training_steps": "max_steps",
    "num_warmup_steps": "warmup_steps",
    "num_workers": "dataloader_num_workers",
    "optimizer": "optim",
    "optimizer_kwargs": "optim_args",
    "out": "output_dir",
    "out_dir": "output_dir",
    "output": "output_dir",
    "pin_memory": "dataloader_pin_memory",
    "random_seed": "seed",
    "resume": "resume_from_checkpoint",
    "resume_from": "resume_from_checkpoint",
    "sample_packing": "packing",
    "save_dir": "output_dir",
    "save_freq": "save_steps",
    "save_interval": "save_steps",
    "save_top_k": "save_total_limit",
    "sched": "lr_scheduler_type",
    "schedule": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "steps": "max_steps",
    "total_steps": "max_steps",
    "train_steps": "max_steps",
    "val_batch_size": "per_device_eval_batch_size",
    "val_check_interval": "eval_steps",
    "val_every": "eval_steps",
    "wandb": "report_to",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "workers": "dataloader_num_workers",
    "zero": "deepspeed",
}

# Field -> a fact that the people who use another word for it need.
NOTES: dict[str, str] = {
    "adam_beta1": "adam_beta1 and adam_beta2 are two numbers",
    "bf16": "fp16=True is the other half precision",
    "lr_scheduler_kwargs": "as {'min_lr': 1e-6}, with lr_scheduler_type='cosine_with_min_lr'",
    "report_to": "as report_to='wandb'",
    "warmup_steps": "a number below 1 is a share of all steps",
}


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A word for something that is not one field of TrainingArguments."""

    script: str  # sentence for TrainingArguments
    file: str  # sentence for a configuration file and the command line


_DEVICES = Elsewhere(
    script="Each process has one device; start several with torchrun --nproc_per_node=2 script.py.",
    file="Did you mean launch.processes? `trainwright train config.yaml --processes 2` starts two.",
)
_LORA = Elsewhere(
    script="Give Trainer the model of peft's get_peft_model(model, LoraConfig(...)).",
    file="Did you mean lora? It is a section of its own: `lora: {r: 16, alpha: 32}`.",
)
_LENGTH = Elsewhere(
    script="The tokenizer cuts texts: tokenizer(text, truncation=True, max_length=512). Packed rows: packing_length.",
    file="Did you mean data.max_length?",
)
_PRECISION = Elsewhere(
    script="Write bf16=True or fp16=True; without either, training is in float32.",
    file="Did you mean training.bf16 or training.fp16? Set one to true; without either, training is in float32.",
)
_STOPPING = Elsewhere(
    script="Give Trainer callbacks=[EarlyStoppingCallback(early_stopping_patience=3)].",
    file="Did you mean training.early_stopping_patience?",
)
_PREFERENCES = Elsewhere(
    script="Preference training is in TRL, and its trainers run on Trainwright: see docs/libraries.md.",
    file="Did you mean `task: preference` or `task: reward`? TRL's other trainers run in a script: docs/libraries.md.",
)
_CHAT = Elsewhere(
    script="Tokenize conversations with the tokenizer's chat template; a configuration file has `task: chat`.",
    file="Did you mean `task: chat`?",
)
_MODEL = Elsewhere(
    script="The model is an argument of Trainer: Trainer(model=AutoModel....from_pretrained(name), args=args).",
    file="Did you mean model.path?",
)
_BITS = Elsewhere(
    script="Load the model with quantization_config=BitsAndBytesConfig(...) and put an adapter of peft on it.",
    file="Did you mean model.quantization? It is 4bit or 8bit, and needs lora.",
)
_SHARDING = Elsewhere(
    script="Write fsdp='full_shard' or deepspeed='config.json'; several processes alone are data parallel.",
    file="Did you mean training.fsdp or training.deepspeed? Several processes alone are data parallel.",
)
_TRAIN = Elsewhere(script="Data are arguments of Trainer: Trainer(train_dataset=...).", file="Did you mean data.train?")
_EVAL = Elsewhere(script="Data are arguments of Trainer: Trainer(eval_dataset=...).", file="Did you mean data.eval?")

ELSEWHERE: dict[str, Elsewhere] = {
    **dict.fromkeys(("accelerator", "device", "devices", "gpu", "gpus", "n_gpus", "nproc", "num_gpus"), _DEVICES),
    **dict.fromkeys(("num_processes", "nproc_per_node", "world_size"), _DEVICES),
    **dict.fromkeys(("adapter", "dora", "lora", "lora_alpha", "lora_r", "lora_rank", "peft", "use_lora"), _LORA),
    **dict.fromkeys(("block_size", "context_length", "cutoff_len", "max_len", "max_length"), _LENGTH),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "seq_len", "seq_length", "sequence_len"), _LENGTH),
    **dict.fromkeys(("dtype", "mixed_precision", "precision", "torch_dtype"), _PRECISION),
    **dict.fromkeys(("early_stop", "early_stopping", "early_stopping_patience", "patience"), _STOPPING),
    **dict.fromkeys(("dpo", "grpo", "orpo", "ppo", "reward", "rlhf"), _PREFERENCES),
    **dict.fromkeys(("instruct", "instruction_tuning", "sft"), _CHAT),
    **dict.fromkeys(("base_model", "checkpoint", "model", "model_id", "model_name", "model_name_or_path"), _MODEL),
    **dict.fromkeys(("bits", "load_in_4bit", "load_in_8bit", "qlora", "quantization", "quantize"), _BITS),
    **dict.fromkeys(("parallelism", "sharding", "strategy"), _SHARDING),
    **dict.fromkeys(("dataset", "datasets", "train_data", "train_dataset", "train_file", "train_files"), _TRAIN),
    **dict.fromkeys(("eval_data", "eval_dataset", "test_file", "val_data", "validation_file"), _EVAL),
}

# Word -> parameter of Trainer.
KEYWORDS: dict[str, str] = {
    "arguments": "args",
    "callback": "callbacks",
    "collate_fn": "data_collator",
    "collator": "data_collator",
    "config": "args",
    "criterion": "compute_loss_func",
    "data": "train_dataset",
    "dataset": "train_dataset",
    "eval_data": "eval_dataset",
    "eval_set": "eval_dataset",
    "feature_extractor": "processing_class",
    "image_processor": "processing_class",
    "loss": "compute_loss_func",
    "loss_fn": "compute_loss_func",
    "lr_scheduler": "optimizers",
    "metric": "compute_metrics",
    "metrics": "compute_metrics",
    "model_fn": "model_init",
    "optim": "optimizers",
    "optimizer": "optimizers",
    "preprocessor": "processing_class",
    "processor": "processing_class",
    "scheduler": "optimizers",
    "train_data": "train_dataset",
    "train_ds": "train_dataset",
    "train_set": "train_dataset",
    "training_args": "args",
    "training_data": "train_dataset",
    "val_data": "eval_dataset",
    "val_dataset": "eval_dataset",
    "val_ds": "eval_dataset",
    "valid_dataset": "eval_dataset",
    "validation_data": "eval_dataset",
    "validation_dataset": "eval_dataset",
}

# Word -> task of a configuration file.
TASK_NAMES: dict[str, str] = {
    "causal": "causal-lm",
    "classification": "text-classification",
    "classifier": "text-classification",
    "clm": "causal-lm",
    "image": "image-classification",
    "instruct": "chat",
    "language-modeling": "causal-lm",
    "lm": "causal-lm",
    "lora": "chat",
    "mlm": "masked-lm",
    "ner": "token-classification",
    "pretrain": "causal-lm",
    "pretraining": "causal-lm",
    "sentiment": "text-classification",
    "sequence-classification": "text-classification",
    "sft": "chat",
    "summarization": "seq2seq",
    "tagging": "token-classification",
    "text": "text-classification",
    "text-generation": "causal-lm",
    "text2text": "seq2seq",
    "translation": "seq2seq",
    "vision": "image-classification",
}

# Word -> value of `optim` or `lr_scheduler_type`, and of strategies.
VALUES: dict[str, str] = {
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "adamw8bit": "adamw_bnb_8bit",
    "cos": "cosine",
    "cosine_annealing": "cosine",
    "epochs": "epoch",
    "lion": "lion_32bit",
    "never": "no",
    "none": "no",
    "paged_adamw": "paged_adamw_32bit",
    "plateau": "reduce_lr_on_plateau",
    "poly": "polynomial",
    "step": "steps",
    "wsd": "warmup_stable_decay",
}


def normal(name: object) -> str:
    """Returns a word as the tables have it: lower case, with underscores."""
    return str(name).lower().replace("-", "_")


def hint_for_argument(name: str, known: Collection[str]) -> str:
    """Returns a sentence, with a space before it, that suggests a name for an unknown training argument.

    Args:
        name: the unknown name.
        known: names that the arguments have.

    Returns:
        The sentence; empty if nothing is near.
    """
    word = normal(name)
    field = FIELDS.get(word)
    if field in known:
        return f" Did you mean {field}?{_note(field)}"
    if word in ELSEWHERE:
        return f" {ELSEWHERE[word].script}"
    if word in KEYWORDS or word in KEYWORDS.values():
        return f" It belongs to Trainer: Trainer({KEYWORDS.get(word, word)}=...)."
    return did_you_mean(name, known)


def hint_for_entry(name: str, known: Sequence[str], near: Collection[str] | None = None) -> str:
    """Returns the same for an unknown entry of a configuration file, or a word of the command line.

    Args:
        name: the unknown name, with or without its parents.
        known: all entries with their parents, as `training.learning_rate`.
        near: names to compare the spelling with (None: all entries).

    Returns:
        The sentence; empty if nothing is near.
    """
    last = name.rpartition(".")[2]
    by_last = {path.rpartition(".")[2]: path for path in reversed(known)}
    if last in by_last:
        return f" Did you mean {by_last[last]}?"
    word = normal(last)
    if word in FIELDS:
        return f" Did you mean training.{FIELDS[word]}?{_note(FIELDS[word])}"
    if word in ELSEWHERE:
        return f" {ELSEWHERE[word].file}"
    if near is not None:
        return did_you_mean(name, near)
    same = nearest(last, by_last)
    return did_you_mean(name, known) if same is None else f" Did you mean {by_last[same]}?"


def hint_for_keyword(name: str, parameters: Collection[str], fields: Collection[str]) -> str:
    """Returns the same for an unknown parameter of Trainer.

    Args:
        name: the unknown name.
        parameters: its parameters.
        fields: names of the training arguments.

    Returns:
        The sentence; empty if nothing is near.
    """
    word = normal(name)
    if word in KEYWORDS:
        parameter = KEYWORDS[word]
        form = " It takes a pair: optimizers=(optimizer, lr_scheduler)." if parameter == "optimizers" else ""
        return f" Did you mean {parameter}?{form}"
    field = name if name in fields else FIELDS.get(word)
    if field is not None:
        return f" It belongs to the training arguments: args=TrainingArguments({field}=...)."
    return f" {ELSEWHERE[word].script}" if word in ELSEWHERE else did_you_mean(name, parameters)


def hint_for_task(name: str, tasks: Iterable[str]) -> str:
    """Returns the same for an unknown task."""
    word = str(name).lower().replace("_", "-")
    if word in TASK_NAMES:
        return f" Did you mean {TASK_NAMES[word]}?"
    if ELSEWHERE.get(normal(name)) is _PREFERENCES:
        return f" {_PREFERENCES.file}"
    return did_you_mean(name, tasks)


def hint_for_value(value: object, allowed: Collection[str]) -> str:
    """Returns the same for an unknown value of an argument with a closed list."""
    meant = VALUES.get(normal(value))
    return f" Did you mean {meant!r}?" if meant in allowed else did_you_mean(value, allowed, quoted=True)


def _note(field: str | None) -> str:
    return f" ({NOTES[field][0].upper()}{NOTES[field][1:]}.)" if field in NOTES else ""
