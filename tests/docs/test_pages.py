"""What the pages show runs as it stands there, and the site is built without a warning."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from transformers import BertConfig, BertForSequenceClassification

from trainwright import TrainingArguments

from .._support.small import StopAt
from .._support.subprocesses import run_python
from ..parity import data, models

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "```python" in path.read_text(encoding="utf-8"))
# Their blocks are shown by tests of their own: other libraries take their imports from a fresh process, and searches go
# to tests/search.
SHOWN_ELSEWHERE = {"compat.md", "search.md"}


def new_model() -> Any:
    config = BertConfig(
        vocab_size=models.VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    return models.seeded(lambda: BertForSequenceClassification(config))


def rows(size: int) -> list[dict[str, Any]]:
    return [row | {"labels": row["labels"] % 2} for row in data.ragged_texts(size)]


@pytest.mark.costly
@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in SHOWN_ELSEWHERE], ids=lambda p: p.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = Sybil([PythonCodeBlockParser()]).parse(page)
    document.namespace.update(
        model=new_model(), new_model=new_model, tokenizer=data.tokenizer(), train_dataset=rows(24),
        eval_dataset=rows(9), stops_after=StopAt, torch=torch,
    )  # fmt: skip
    examples = list(document.examples())
    assert examples
    for example in examples:
        example.evaluate()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    run_python(*command, cwd=ROOT, timeout_s=290)
    pages = {name: (tmp_path / f"reference/{name}/index.html").read_text() for name in ("trainer", "arguments")}
    assert all(f"<code>{field.name}</code>" in pages["arguments"] for field in fields(TrainingArguments))
    assert "hyperparameter_search" in pages["trainer"]
