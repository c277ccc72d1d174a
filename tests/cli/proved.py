"""Tiny chat models with and without adapters, for the tests of exports and of conversations."""

from __future__ import annotations

import json
from pathlib import Path

from .commands import done

WORDS = ("red", "blue", "green", "white")
ROWS = [{"question": f"say {word}", "answer": f"{word} it is"} for word in WORDS * 8]
BASE = """\
task: chat
model:
  config: {model_type: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
           intermediate_size: 32, max_position_embeddings: 64, tie_word_embeddings: false}
  learn_tokenizer: {kind: words, vocab_size: 64}
data: {train: rows.jsonl, eval: rows.jsonl, max_length: 48}
training: {output_dir: first, max_steps: 40, learning_rate: 2e-2, use_cpu: true, save_strategy: "no",
           per_device_train_batch_size: 4}
"""
TUNED = """\
task: chat
model: {path: base}
data: {train: rows.jsonl, eval_share: 0.5, max_length: 48}
lora: {r: 4, alpha: 8, target_modules: [q_proj, v_proj], modules_to_save: [lm_head]}
training: {output_dir: tuned, max_steps: 6, learning_rate: 1e-2, use_cpu: true, save_steps: 6}
"""


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def make_base(folder: Path, *, steps: int = 40, **config: str) -> Path:
    """Trains a chat model in a directory, which answers after 150 steps, and exports it to `base`; returns that."""
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "base.yaml").write_text(BASE)
    changes = [word for name, value in config.items() for word in ("--set", f"model.config.{name}={value}")]
    done("train", str(folder / "base.yaml"), "--max_steps", str(steps), *changes)
    done("export", str(folder / "first"), str(folder / "base"))
    return folder / "base"


def tune(folder: Path, text: str = TUNED, name: str = "tuned.yaml") -> None:
    """Trains an adapter on `base`, as a configuration says."""
    (folder / name).write_text(text)
    done("train", str(folder / name))
