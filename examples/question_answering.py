"""Fine-tune MiniLM to answer questions about tweets by pointing at words: "Which person is named?" and the like.

The questions are made of the names that people marked in the tweets; the answer is a span of the text. Scores: the
share of exact answers, and the F1 between the words that were pointed at and those of the answer.

    python examples/question_answering.py --num_train_epochs 4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from _common import held_out, minilm, train_and_evaluate, tweets
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedTokenizerBase

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/question_answering",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 5e-4,
    "warmup_steps": 0.1,
    "logging_steps": 0.25,
    "save_strategy": "epoch",
    "save_total_limit": 1,
}
KINDS = {
    "person": "Which person is named?",
    "geo-loc": "Which place is named?",
    "company": "Which company is named?",
    "facility": "Which building or site is named?",
    "product": "Which product is named?",
    "sportsteam": "Which team is named?",
    "musicartist": "Which musician is named?",
    "movie": "Which film is named?",
    "tvshow": "Which show is named?",
    "other": "Which other thing is named?",
}


class Question(NamedTuple):
    text: str
    words: list[str]
    first: int
    """The answer's first word, and its last."""
    last: int


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: MiniLM, a data package."})
    max_length: int = field(default=72, metadata={"help": "Tokens of question and tweet; longer pairs are cut off."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    path = model_args.model_name_or_path or minilm()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [encode(question, tokenizer, model_args.max_length) for question in questions()]
    rows = [row for row in rows if row["end_positions"] > 0]  # a cut may have taken the answer away
    train_rows, eval_rows = held_out(rows, num_train=len(rows), num_eval=250)
    trainer = Trainer(
        model=AutoModelForQuestionAnswering.from_pretrained(path),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        compute_metrics=answers,
    )
    train_and_evaluate(trainer, "exact_match", "f1")


def questions() -> list[Question]:
    """One for each kind of name that a tweet has exactly once: others would have two right answers."""
    found = []
    for words, tags in tweets():
        for kind, text in KINDS.items():
            starts = [i for i, tag in enumerate(tags) if tag == f"B-{kind}"]
            if len(starts) == 1:
                last = starts[0]
                while last + 1 < len(tags) and tags[last + 1] == f"I-{kind}":
                    last += 1
                found.append(Question(text, words, starts[0], last))
    return found


def encode(question: Question, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Any]:
    """Question and tweet in one row; the answer as the position of its first and of its last token (0: cut off)."""
    encoded = tokenizer(
        question.text.split(), question.words, is_split_into_words=True, truncation="only_second", max_length=max_length
    )
    tokens = list(zip(encoded.sequence_ids(0), encoded.word_ids(0), strict=True))
    inside = [at for at, (part, word) in enumerate(tokens) if part == 1 and question.first <= word <= question.last]
    return {**encoded, "start_positions": inside[0] if inside else 0, "end_positions": inside[-1] if inside else 0}


def answers(prediction: EvalPrediction) -> dict[str, float]:
    """Start and end are predicted apart; a pair whose end comes first points at nothing."""
    (starts, ends) = prediction.predictions[:2]
    (true_starts, true_ends) = prediction.label_ids
    starts, ends = (np.where(scores == -100, -np.inf, scores).argmax(axis=-1) for scores in (starts, ends))
    overlap = np.minimum(ends, true_ends) - np.maximum(starts, true_starts) + 1
    sizes = np.maximum(ends - starts + 1, 0) + true_ends - true_starts + 1
    exact = (starts == true_starts) & (ends == true_ends)
    return {"exact_match": float(exact.mean()), "f1": float((2 * np.maximum(overlap, 0) / sizes).mean())}


if __name__ == "__main__":
    main()
