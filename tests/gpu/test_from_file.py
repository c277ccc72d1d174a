"""On a GPU, what somebody with one types: a chat model from a file, an adapter, an answer, a proved merged model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ..cli.commands import done
from .cases import on_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*:FutureWarning"),
]
WORDS = ("red", "blue", "green", "white")
BASE = """\
task: chat
model:
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
           intermediate_size: 128, max_position_embeddings: 64}
  learn_tokenizer: {kind: words, vocab_size: 64}
data: {train: rows.jsonl, eval: rows.jsonl}
training: {output_dir: run, max_steps: 60, packing: best_fit, packing_length: 40, learning_rate: 5e-3, bf16: true,
           logging_steps: 10, save_steps: 60, per_device_train_batch_size: 4}
"""
TUNED = """\
task: chat
model: {path: base, dtype: bfloat16}
data: {train: rows.jsonl, eval: rows.jsonl}
lora: {r: 4}
training: {output_dir: tuned, max_steps: 8, learning_rate: 1e-2, bf16: true, save_steps: 4, logging_steps: 4}
"""


def write_rows(folder: Path) -> None:
    rows = [{"question": f"say {word}", "answer": f"{word} it is"} for word in WORDS * 8]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def train_base(folder: Path) -> None:
    write_rows(folder)
    (folder / "base.yaml").write_text(BASE)
    done("train", "base.yaml")
    done("export", "run", "base")


def ask(run: str) -> str:
    return str(json.loads(done("chat", run, "--once", "say green", "--json"))["answer"])


def test_a_chat_is_trained_tuned_proved_and_asked(tmp_path: Path, record_property: Any) -> None:
    train_base(tmp_path)
    assert ask("run") == "green it is"
    (tmp_path / "tuned.yaml").write_text(TUNED)
    shown = done("train", "tuned.yaml")
    assert "LoRA" in shown
    proof = json.loads(done("export", "tuned", "merged", "--merge", "--prove", "--json"))
    record_property("proof", json.dumps(proof))
    assert ask("merged") == ask("tuned") == "green it is"


@on_cuda
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_an_adapter_on_four_bits_is_trained_and_asked(tmp_path: Path, record_property: Any) -> None:
    train_base(tmp_path)
    (tmp_path / "tuned.yaml").write_text(TUNED.replace("path: base", "path: base, quantization: 4bit"))
    torch.cuda.reset_peak_memory_stats()
    done("train", "tuned.yaml")
    done("resume", "tuned", "--set", "training.max_steps=10")
    record_property("answer", ask("tuned"))
    # The exported base has no few bits, which may be seen in the rows.
    said = done("export", "tuned", "merged", "--merge", "--prove", "--accept-differences", "--json")
    record_property("proof", said)
    assert ask("tuned") == ask("merged") == "green it is"


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_pairs_are_learned(tmp_path: Path, record_property: Any) -> None:
    train_base(tmp_path)
    pairs = [
        {
            "prompt": turn("user", f"say {one}"),
            "chosen": turn("assistant", "white it is"),
            "rejected": turn("assistant", one),
        }
        for one in WORDS[:3] * 8
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    text = TUNED.replace("task: chat", "task: preference").replace("rows.jsonl", "pairs.jsonl")
    (tmp_path / "pairs.yaml").write_text(text.replace("tuned", "pairs"))
    done("train", "pairs.yaml")
    entries = [json.loads(line) for line in (tmp_path / "pairs" / "journal.jsonl").read_text().splitlines()]
    accuracies = [one["values"]["eval_rewards/accuracies"] for one in entries if one["kind"] == "evaluation"]
    record_property("accuracies", accuracies)
    assert accuracies[-1] > 0.9
