"""The scores of each task, from an EvalPrediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainwright.cli.user_code import check_metrics, describe_failure, load_function
from trainwright.errors import RecipeError, needs_package
from trainwright.evaluation.outputs import EvalPrediction

Scores = dict[str, float]
Scorer = Callable[["EvalPrediction"], Scores]
Span = tuple[int, int, str]


def accuracy_and_f1(prediction: EvalPrediction) -> Scores:
    """Computes the share of correct labels, and the mean of the labels' F1 scores."""
    guessed = prediction.predictions.argmax(axis=-1)
    labels = prediction.label_ids
    scores = []
    for label in np.unique(labels):
        hits = np.sum((guessed == label) & (labels == label))
        scores.append(2 * hits / (np.sum(guessed == label) + np.sum(labels == label)))
    return {"accuracy": float(np.mean(guessed == labels)), "f1": float(np.mean(scores))}


def score_label_sets(prediction: EvalPrediction) -> Scores:
    """Computes F1 over all labels together and as a mean over labels, and the share of rows with all labels right.

    A label that is neither there nor predicted counts 0 in the mean, as in scikit-learn.
    """
    guessed = np.asarray(prediction.predictions) > 0
    labels = np.asarray(prediction.label_ids) > 0
    hits = np.sum(guessed & labels, axis=0)
    sizes = np.sum(guessed, axis=0) + np.sum(labels, axis=0)
    return {
        "f1_micro": float(2 * hits.sum() / max(sizes.sum(), 1)),
        "f1_macro": float(np.mean(2 * hits / np.maximum(sizes, 1))),
        "subset_accuracy": float(np.mean(np.all(guessed == labels, axis=1))),
    }


def score_numbers(prediction: EvalPrediction) -> Scores:
    """Computes Pearson's correlation (0 if all predictions are equal), and two mean errors."""
    guessed = np.ravel(prediction.predictions).astype(float)
    labels = np.ravel(prediction.label_ids).astype(float)
    spread = guessed.std() * labels.std()
    pearson = float(np.mean((guessed - guessed.mean()) * (labels - labels.mean())) / spread) if spread > 0 else 0.0
    error = guessed - labels
    return {"pearson": pearson, "rmse": math.sqrt(np.mean(error**2)), "mae": float(np.mean(np.abs(error)))}


def best_guess(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: object) -> torch.Tensor:
    """Returns the index of the highest score, which is all that these metrics need."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def guessed_tokens(prediction: EvalPrediction) -> Scores:
    """Computes the share of masked tokens that were predicted."""
    hidden = prediction.label_ids != -100
    right = (prediction.predictions == prediction.label_ids)[hidden]
    return {"guessed": float(right.mean()) if right.size else 0.0}


def span_scorer(names: Sequence[str]) -> Callable[[EvalPrediction], Scores]:
    """Returns the scorer of tags: accuracy; with B- and I- tags, also precision, recall and F1 over whole entities."""
    has_spans = any(name.startswith(("B-", "I-")) for name in names)

    def scores(prediction: EvalPrediction) -> Scores:
        hits = num_found = num_true = num_right = num_words = 0
        for guessed, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
            counts = labels != -100
            found, true = ([names[i] for i in np.asarray(ids)[counts]] for ids in (guessed, labels))
            num_right += sum(one == other for one, other in zip(found, true, strict=True))
            num_words += len(true)
            if has_spans:
                spans_found = spans(found)
                spans_true = spans(true)
                hits += len(spans_found & spans_true)
                num_found += len(spans_found)
                num_true += len(spans_true)
        accuracy = {"accuracy": num_right / max(num_words, 1)}
        if not has_spans:
            return accuracy
        f1 = 2 * hits / max(num_found + num_true, 1)
        return {"f1": f1, "precision": hits / max(num_found, 1), "recall": hits / max(num_true, 1), **accuracy}

    return scores


def spans(tags: Sequence[str]) -> set[Span]:
    """Returns the entities in a row of tags: first word, word after the last, type."""
    found: set[Span] = set()
    start = 0
    kind = ""
    for at, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((start, at, kind))
            kind = ""
        if tag.startswith("B-") or (tag.startswith("I-") and not kind):
            start = at
            kind = tag[2:]
    return found


def with_texts(tokenizer: PreTrainedTokenizerBase, scorer: Scorer) -> Scorer:
    """Returns a scorer that gets lists of texts, without special tokens and blanks at their ends, in place of ids."""

    def scores(prediction: EvalPrediction) -> Scores:
        written, true = (
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        return scorer(EvalPrediction([one.strip() for one in written], [one.strip() for one in true]))

    return scores


def exact_match(prediction: EvalPrediction) -> Scores:
    """Computes the share of texts without a mistake."""
    right = [one == other for one, other in zip(prediction.predictions, prediction.label_ids, strict=True)]
    return {"exact_match": float(np.mean(right))}


ROUGE = ("rouge1", "rouge2", "rougeL")


def find_rouge() -> Scorer:
    """Returns the scorer of texts by ROUGE, with stems of words, as in transformers' example of summarization.

    Raises:
        MissingPackageError: the package rouge-score is not installed.
    """
    with needs_package("metrics: rouge needs the package rouge-score: pip install rouge-score"):
        from rouge_score import rouge_scorer
    scorer: Any = rouge_scorer.RougeScorer(ROUGE, use_stemmer=True)

    def scores(prediction: EvalPrediction) -> Scores:
        pairs = zip(prediction.predictions, prediction.label_ids, strict=True)
        found = [scorer.score(true, written) for written, true in pairs]
        return {name: float(np.mean([one[name].fmeasure for one in found])) for name in ROUGE}

    return scores


def find_metrics(names: Sequence[str]) -> list[Scorer]:
    """Returns the scorers that a file names.

    Raises:
        MissingPackageError: a package is missing.
        RecipeError: a function cannot be imported.
    """
    return [find_rouge() if name == "rouge" else _find_function(name) for name in names]


def _find_function(name: str) -> Scorer:
    function = load_function(name, entry="metrics")
    entry = f"metrics: {name}"

    def scores(prediction: EvalPrediction) -> Scores:
        try:
            found = function(prediction)
        # whatever the user's function raises, an exit too
        except (Exception, SystemExit) as error:
            raise RecipeError(f"{entry}: the function failed: {describe_failure(error)}") from error
        return check_metrics(found, entry=entry)

    return scores


def join_scorers(scorers: Sequence[Scorer]) -> Scorer | None:
    """Returns a scorer with the scores of all; None of none. RecipeError for two scores with one name."""
    if len(scorers) < 2:
        return scorers[0] if scorers else None

    def scores(prediction: EvalPrediction) -> Scores:
        found: Scores = {}
        for scorer in scorers:
            more = scorer(prediction)
            twice = sorted(found.keys() & more.keys())
            if twice:
                raise RecipeError(f"metrics: there are two scores {twice[0]}. Return it under another name.")
            found |= more
        return found

    return scores
