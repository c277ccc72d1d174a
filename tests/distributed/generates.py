"""Predicts by generation in each of two processes, and tells what came of it: `generates.py FOLDER [fsdp|zero]`."""

import sys
from pathlib import Path
from typing import Any

import torch
from tests._support.two_processes import tell
from tests.parity import data, models
from transformers import DataCollatorForSeq2Seq

from trainwright import Seq2SeqTrainer, Seq2SeqTrainingArguments

FOLDER = Path(sys.argv[1])
SHARDING: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "zero": {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}},
}
PARTS = SHARDING[sys.argv[2]] if len(sys.argv) > 2 else {}


def rows(kind: str) -> list[dict[str, Any]]:
    """Seven: neither four batches of two nor two processes divide them. The lengths differ between the processes."""
    g = torch.Generator().manual_seed(4)
    made = []
    for i in range(7):
        ids, answer = (torch.randint(5, 48, (size,), generator=g).tolist() for size in (3 + i % 4, 2 + i * 3 % 5))
        together = {"input_ids": ids + answer, "labels": [-100] * len(ids) + answer}
        row = together if kind == "llama" else {"input_ids": ids, "labels": answer}
        made.append({**row, "attention_mask": [1] * len(row["input_ids"])})
    return made


def lengths(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.predictions), "sum": float(prediction.predictions.clip(0).sum())}


for kind, build in (("t5", models.t5), ("llama", models.llama)):
    for beams in (1, 3):
        args = Seq2SeqTrainingArguments(
            str(FOLDER / kind),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            max_steps=2,
            predict_with_generate=True,
            generation_num_beams=beams,
            per_device_eval_batch_size=2,
            learning_rate=0.0,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=1,
            log_level="error",
            **PARTS,
        )
        trainer = Seq2SeqTrainer(
            model=models.seeded(build),
            args=args,
            train_dataset=rows(kind),
            eval_dataset=rows(kind),
            data_collator=DataCollatorForSeq2Seq(data.tokenizer()),
            processing_class=data.tokenizer(),
            compute_metrics=lengths,
        )
        trainer.train()
        output = trainer.predict(rows(kind), max_new_tokens=6)
        during = [entry["eval_sum"] for entry in trainer.state.log_history if "eval_sum" in entry]
        told = {
            "predictions": output.predictions.tolist(),
            "labels": output.label_ids.tolist(),
            "loss": output.metrics["test_loss"],
            "rows": output.metrics["test_rows"],
            "during": during,
        }
        tell(**{f"{kind}-{beams}": told})
