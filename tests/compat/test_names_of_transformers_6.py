"""Names that go away in transformers 6: no file of ours uses one, so nobody is warned of them by a run of ours."""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import LoraConfig, get_peft_model

import trainwright
from trainwright.support.patches import checkpointed_activations

from .._support.small import data, make_trainer, models
from ..sources.parsed import parse_file

SRC = Path(trainwright.__file__).parent
THEIRS = Path(transformers.__file__).parent
# "`old` is deprecated and will be removed in v6", as transformers words it.
GOES_AWAY = re.compile(r"`(\w+)` is deprecated and will be removed in v6")
MENTIONS_6 = re.compile(r"\bv6\b|[Tt]ransformers (version )?v?6\b|\b6\.0\.0\b")
# Our own fields, also under their older names, which our files must know.
OWN_FIELDS = ("gradient_checkpointing", "gradient_checkpointing_kwargs")


def names_that_go_away() -> set[str]:
    files = ("modeling_utils.py", "trainer.py", "training_args.py", "trainer_utils.py", "trainer_callback.py")
    texts = [(THEIRS / name).read_text(encoding="utf-8") for name in files]
    return {name for text in texts for name in GOES_AWAY.findall(text)}


def uses_of(names: set[str]) -> Iterator[str]:
    """Yields where a file of ours reads an attribute, passes a keyword or imports something of such a name."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(parse_file(path)):
            found: list[str | None] = []
            if isinstance(node, ast.Attribute):
                found = [node.attr]
            elif isinstance(node, ast.keyword):
                found = [node.arg]
            elif isinstance(node, ast.ImportFrom | ast.Import):
                found = [alias.name for alias in node.names]
            yield from (f"{path.relative_to(SRC)}: {name}" for name in found if name in names)


@pytest.mark.more
@pytest.mark.framework
def test_no_file_uses_a_name_that_goes_away() -> None:
    names = names_that_go_away()
    assert {"gradient_checkpointing_enable", "is_gradient_checkpointing"} <= names
    assert list(uses_of(names - {*OWN_FIELDS})) == []


# -- runs --------------------------------------------------------------------------------------------------------------


@contextmanager
def said() -> Iterator[list[str]]:
    """Collects, within it, all warnings and what transformers logs."""
    texts: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Listens(logging.WARNING)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield texts
        texts.extend(str(one.message) for one in found)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def saved_and_resumed(folder: Path) -> None:
    settings: dict[str, Any] = {
        "train_dataset": data.sequences(16),
        "eval_dataset": data.sequences(4),
        "max_steps": 4,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "log_level": "warning",
    }
    for resumed in (None, str(folder / "checkpoint-2")):
        trainer = make_trainer(folder, model=models.seeded(models.llama), **settings)
        trainer.train(resume_from_checkpoint=resumed)
    trainer.save_model()
    trainer.create_model_card()


def recomputed(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks a model by the older name
        adapted = get_peft_model(models.seeded(models.llama), LoraConfig(r=2))  # type: ignore[arg-type]
    for model in (models.seeded(models.llama), adapted):
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            make_trainer(
                folder, model=model, train_dataset=data.sequences(8), max_steps=1, log_level="warning", **{name: True}
            ).train()


def generated(folder: Path) -> None:
    args = trainwright.Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=1,
        predict_with_generate=True,
        generation_max_length=5,
        log_level="warning",
    )
    model: Any = models.seeded(models.t5)
    rows = data.sequences(4)
    trainer = trainwright.Seq2SeqTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.predict(rows)


@pytest.mark.framework
@pytest.mark.parametrize("work", [saved_and_resumed, recomputed, generated])
def test_a_run_is_warned_of_none(work: Callable[[Path], None], tmp_path: Path) -> None:
    with said() as texts:
        work(tmp_path)
    assert [text for text in texts if MENTIONS_6.search(text)] == []


@pytest.mark.framework
def test_a_warning_would_be_seen() -> None:
    model: Any = models.seeded(models.llama)
    with said() as texts:
        model.gradient_checkpointing_enable()
    assert [text for text in texts if MENTIONS_6.search(text)] != []
    with said() as texts, checkpointed_activations(model, None):
        pass
    assert [text for text in texts if MENTIONS_6.search(text)] == []
