"""Commands called as a person calls them: in this process where that is enough, in one of their own for signals."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from trainwright.cli.main import app

from .._support import forked

ROOT = Path(__file__).resolve().parents[2]

# A classifier of a few thousand weights, from scratch, on a table of 64 rows: a second to train.
SMALL = """\
task: text-classification
model:
  config: {model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}
  learn_tokenizer: {kind: words, vocab_size: 64}
data:
  train: table.csv
  eval_share: 0.25
  max_length: 16
training:
  output_dir: run
  max_steps: 8
  per_device_train_batch_size: 4
  logging_steps: 2
  save_steps: 4
  eval_strategy: steps
  eval_steps: 4
  learning_rate: 1e-2
  use_cpu: true
"""


def call(*words: str, stdin: str | bytes | None = None) -> Result:
    """Runs `trainwright ...` here."""
    environment = {"COLUMNS": "80", "LINES": "24"}
    result = CliRunner().invoke(app, list(words), input=stdin, prog_name="trainwright", env=environment)
    return result  # type: ignore[return-value]


def done(*words: str) -> str:
    """Runs it, and fails unless it ends well; returns its lines, with `--json` those on standard output alone."""
    result = call(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout if "--json" in words else result.output


def start(*words: str, folder: Path) -> forked.Process:
    """Runs `python -m trainwright ...` in a process of its own."""
    return forked.start(["-m", "trainwright", *words], cwd=folder)


def small(folder: Path, text: str = SMALL) -> Path:
    """Writes the small configuration, and its table, into a directory."""
    lines = ["text,label"]
    for number in range(64):
        word = "good" if number % 2 else "bad"
        lines.append(
            f"it was a {word} {number} film {'and a long one ' * (number % 3)},{'yes' if number % 2 else 'no'}"
        )
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    path = folder / "config.yaml"
    path.write_text(text)
    return path
