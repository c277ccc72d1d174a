"""Trainings with other libraries' trainers, tiny and real: each returns what it logged and the weights it ended with.

Runs in a process of its own (side.py), so it imports the libraries at the top: after `install()`, or without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = ("the", "cat", "sat", "on", "mat", "and", "saw", "two", "dogs", "run", "over", "green", "hills", "at", "dawn")
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 2,
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}
OF_TRL: dict[str, Any] = {**SETTINGS, "bf16": False}
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def case(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def sentence(number: int, length: int = 0) -> str:
    """A sentence that depends on a number, of 4 to 11 words."""
    length = length or 4 + number % 8
    return " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(length))


SENTENCES = [sentence(number) for number in range(64)]


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Words as tokens: with a chat template for causal models, with [CLS] and [SEP] for encoders."""
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<s>", "</s>", "[CLS]", "[SEP]"]
    inner.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=special))
    if kind == "encoder":
        ids = [(name, inner.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
        )
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        names = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", **names)


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        **changes,
    )


def llama(folder: Path) -> LlamaForCausalLM:
    """A small model loaded from a directory, where DPO and KTO find their reference model again."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(folder / "model")
    return LlamaForCausalLM.from_pretrained(folder / "model")


def bert_config(dropout: float = 0.0, **changes: Any) -> BertConfig:
    return BertConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **changes,
    )


def texts(number: int) -> Dataset:
    return Dataset.from_dict({"text": SENTENCES[:number]})


def pairs(number: int) -> Dataset:
    rows = range(number)
    return Dataset.from_dict(
        {
            "prompt": [sentence(i, 4) for i in rows],
            "chosen": [" " + sentence(i + 1, 5) for i in rows],
            "rejected": [" " + sentence(i + 2, 3) for i in rows],
        }
    )


def outcome(trainer: Any) -> dict[str, Any]:
    """What can be compared of a finished run: logs without clock times, a digest of the weights, the files saved."""
    return {"logs": logs(trainer), "weights": digest(trainer.model), "files": files(Path(trainer.args.output_dir))}


def logs(trainer: Any) -> list[dict[str, Any]]:
    clocks = ("runtime", "per_second", "step_time", "completions/clipped")
    return [{k: v for k, v in entry.items() if not any(c in k for c in clocks)} for entry in trainer.state.log_history]


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def files(folder: Path) -> list[str]:
    """Files of the checkpoints that both sides write."""
    # The last has, for one, the answer to whether a loss of the user's is a mean.
    ours = {"manifest.json", "training_args.json", "extension_states.pt"}
    found = (path for path in folder.glob("checkpoint-*/**/*") if path.is_file() and path.name not in ours)
    return sorted(str(path.relative_to(folder)) for path in found)


def trained(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return outcome(trainer)


# -- TRL --------------------------------------------------------------------------------------------------------------


def sft(folder: Path, dataset: Dataset | None = None, **changes: Any) -> Any:
    extra = {name: changes.pop(name) for name in ("peft_config",) if name in changes}
    args = SFTConfig(output_dir=str(folder), max_length=32, **(OF_TRL | changes))
    dataset = texts(64) if dataset is None else dataset
    return SFTTrainer(
        llama(folder),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(8)),
        processing_class=tokenizer("decoder"),
        **extra,
    )


@case
def trl_sft(folder: Path) -> dict[str, Any]:
    return trained(sft(folder))


@case
def trl_sft_packing(folder: Path) -> dict[str, Any]:
    return trained(sft(folder, packing=True, eval_packing=False))


@case
def trl_sft_completion_only(folder: Path) -> dict[str, Any]:
    rows = pairs(32)
    data = Dataset.from_dict({"prompt": rows["prompt"][:], "completion": rows["chosen"][:]})
    return trained(sft(folder, data, completion_only_loss=True))


@case
def trl_sft_peft(folder: Path) -> dict[str, Any]:
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    return trained(sft(folder, peft_config=lora))


@case
def trl_sft_resumed(folder: Path) -> dict[str, Any]:
    sft(folder).train()
    trainer = sft(folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return outcome(trainer)


@case
def trl_dpo(folder: Path) -> dict[str, Any]:
    args = DPOConfig(output_dir=str(folder), max_length=32, **OF_TRL)
    data = pairs(32)
    return trained(
        DPOTrainer(
            llama(folder),
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tokenizer("decoder"),
        )
    )


@case
def trl_reward(folder: Path) -> dict[str, Any]:
    args = RewardConfig(output_dir=str(folder), max_length=32, **OF_TRL)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(llama_config(num_labels=1))
    data = pairs(32)
    return trained(
        RewardTrainer(
            model,
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tokenizer("decoder"),
        )
    )


@case
def trl_kto(folder: Path) -> dict[str, Any]:
    rows = pairs(32)
    data = Dataset.from_dict(
        {"prompt": rows["prompt"][:], "completion": rows["chosen"][:], "label": [i % 2 == 0 for i in range(32)]}
    )
    args = KTOConfig(output_dir=str(folder), max_length=32, **OF_TRL)
    return trained(
        KTOTrainer(
            llama(folder),
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tokenizer("decoder"),
        )
    )


@case
def trl_grpo(folder: Path) -> dict[str, Any]:
    return trained(with_rewards(GRPOTrainer, GRPOConfig, folder))


@case
def trl_rloo(folder: Path) -> dict[str, Any]:
    return trained(with_rewards(RLOOTrainer, RLOOConfig, folder))


def with_rewards(trainer: Any, config: Any, folder: Path) -> Any:
    """A trainer whose batches are lists of prompts; what it generates for them is evaluated too.

    Once, at the end: transformers' evaluation advances the random numbers that the next step generates with.
    """
    settings = OF_TRL | {"max_steps": 3, "eval_steps": 3, "save_steps": 3, "logging_steps": 1}
    args = config(output_dir=str(folder), num_generations=4, max_completion_length=6, **settings)
    data = Dataset.from_dict({"prompt": [sentence(i, 4) for i in range(16)]})

    def likes_long_ones(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    return trainer(
        llama(folder),
        args=args,
        reward_funcs=likes_long_ones,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer("decoder"),
    )


# -- sentence-transformers --------------------------------------------------------------------------------------------


def encoder(folder: Path) -> Any:
    torch.manual_seed(0)
    made = folder / "encoder"
    BertModel(bert_config()).save_pretrained(made)
    tokenizer("encoder").save_pretrained(made)
    transformer = Transformer(str(made))
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


@case
def sentence_transformers_two_datasets(folder: Path) -> dict[str, Any]:
    model = encoder(folder)
    rows = range(32)
    scored = Dataset.from_dict(
        {
            "sentence1": [sentence(i) for i in rows],
            "sentence2": [sentence(i + 1) for i in rows],
            "score": [i / 32 for i in rows],
        }
    )
    matched = Dataset.from_dict({"anchor": [sentence(i) for i in rows], "positive": [sentence(i, 5) for i in rows]})
    args = SentenceTransformerTrainingArguments(output_dir=str(folder / "run"), **SETTINGS)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset={"scored": scored, "matched": matched},
        eval_dataset={"scored": scored.select(range(8)), "matched": matched.select(range(8))},
        loss={"scored": losses.CosineSimilarityLoss(model), "matched": losses.MultipleNegativesRankingLoss(model)},
    )
    return trained(trainer)


@case
def cross_encoder(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    made = folder / "encoder"
    BertForSequenceClassification(bert_config(num_labels=1)).save_pretrained(made)
    tokenizer("encoder").save_pretrained(made)
    model = CrossEncoder(str(made), device="cpu", num_labels=1)
    rows = range(32)
    data = Dataset.from_dict(
        {
            "query": [sentence(i) for i in rows],
            "answer": [sentence(i + 1) for i in rows],
            "label": [float(i % 2) for i in rows],
        }
    )
    args = CrossEncoderTrainingArguments(output_dir=str(folder / "run"), **SETTINGS)
    loss = BinaryCrossEntropyLoss(model)
    return trained(
        CrossEncoderTrainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)), loss=loss)
    )


@case
def setfit_few_shots(folder: Path) -> dict[str, Any]:
    from setfit import SetFitModel
    from setfit import Trainer as SetFitTrainer
    from setfit import TrainingArguments as SetFitArguments
    from sklearn.linear_model import LogisticRegression

    model = SetFitModel(model_body=encoder(folder), model_head=LogisticRegression(), labels=["a", "b"])
    rows = range(16)
    data = Dataset.from_dict({"text": [sentence(i, 4 + i % 2) for i in rows], "label": [i % 2 for i in rows]})
    args = SetFitArguments(
        output_dir=str(folder / "run"),
        batch_size=4,
        max_steps=8,
        body_learning_rate=1e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        report_to="none",
        show_progress_bar=False,
    )
    trainer = SetFitTrainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)))
    trainer.train()
    head = model.model_head.coef_.tolist()
    return {
        **outcome(trainer.st_trainer),
        "predictions": [str(p) for p in model.predict(data["text"][:8])],
        "head": head,
    }


@case
def setfit_early_stopping(folder: Path) -> dict[str, Any]:
    """SetFit calls the callbacks itself, by a `call_event` of its own on the handler."""
    import contextlib
    import io

    from setfit import SetFitModel
    from setfit import Trainer as SetFitTrainer
    from setfit import TrainingArguments as SetFitArguments
    from sklearn.linear_model import LogisticRegression
    from transformers import EarlyStoppingCallback

    model = SetFitModel(model_body=encoder(folder), model_head=LogisticRegression(), labels=["a", "b"])
    rows = range(16)
    data = Dataset.from_dict({"text": [sentence(i, 4 + i % 2) for i in rows], "label": [i % 2 for i in rows]})
    args = SetFitArguments(
        output_dir=str(folder / "run"),
        batch_size=4,
        max_steps=20,
        body_learning_rate=1e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        report_to="none",
        metric_for_best_model="embedding_loss",
        show_progress_bar=False,
    )
    nothing_is_better = EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=100.0)
    trainer = SetFitTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)), callbacks=[nothing_is_better]
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    evaluations = [line for line in printed.getvalue().splitlines() if "eval_embedding_loss" in line]
    return {**outcome(trainer.st_trainer), "steps": trainer.st_trainer.state.global_step, "printed": len(evaluations)}


@case
def setfit_default_arguments(folder: Path) -> dict[str, Any]:
    """Without arguments, after a training with an evaluation at each epoch; DVCLive cannot take SetFit's there."""
    from setfit import SetFitModel, training_args
    from setfit import Trainer as SetFitTrainer
    from sklearn.linear_model import LogisticRegression

    training_args.get_available_reporting_integrations = lambda: ["tensorboard"]
    before = Path.cwd()
    os.chdir(folder)  # the default of output_dir is relative
    try:
        model = SetFitModel(model_body=encoder(folder), model_head=LogisticRegression(), labels=["a", "b"])
        rows = range(6)
        data = Dataset.from_dict({"text": [sentence(i, 4 + i % 2) for i in rows], "label": [i % 2 for i in rows]})
        args = training_args.TrainingArguments(eval_strategy="epoch", save_strategy="epoch")
        SetFitTrainer(model=model, args=args, train_dataset=data, eval_dataset=data).train()
        trainer = SetFitTrainer(model=model, train_dataset=data)
        trainer.train()
        return {**outcome(trainer.st_trainer), "head": model.model_head.coef_.tolist()}
    finally:
        os.chdir(before)


# -- PEFT -------------------------------------------------------------------------------------------------------------


@case
def peft_lora_with_the_plain_trainer(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = get_peft_model(
        BertForSequenceClassification(bert_config(num_labels=2)), LoraConfig(task_type="SEQ_CLS", r=4)
    )
    data = [{**tokenizer("encoder")(sentence(i, 6)), "labels": i % 2} for i in range(48)]
    args = TrainingArguments(output_dir=str(folder), **SETTINGS)
    args.loss_weighting = "original"  # BERT ignores the number of items; transformers' arguments take the name, too
    return trained(Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8]))
