"""A tag for each word; a word's tag is the label of its first token, the others have none."""

from __future__ import annotations

from trainwright._types import IGNORE_INDEX
from trainwright.cli.tasks.encoding import Columns, encoded
from trainwright.cli.tasks.labels import find_labels
from trainwright.cli.tasks.models import load_config, load_model
from trainwright.cli.tasks.source import TaskSource
from trainwright.cli.tasks.task_metrics import best_guess, of_spans
from trainwright.cli.tasks.task_objects import TaskObjects, shown
from trainwright.cli.tasks.tokenizers import load_tokenizer, max_length
from trainwright.config.arguments import TrainingArguments


def tagging(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    from transformers import DataCollatorForTokenClassification

    _check_lengths(material)
    labels = find_labels(material, "tags")
    tokenizer = load_tokenizer(material, args, ["words"])
    if not tokenizer.is_fast:
        material.wrong(
            "this tokenizer cannot say which word a token is of; a fast one is needed.", "model", "tokenizer"
        )
    config = load_config(material, tokenizer, **labels.for_config)
    length = max_length(material, tokenizer, config)
    words, tags = (material.recipe.column(role) for role in ("words", "tags"))

    def encode(columns: Columns) -> Columns:
        rows = [[str(word) for word in row] for row in columns[words]]
        found = tokenizer(rows, is_split_into_words=True, truncation=True, max_length=length)
        of_rows = []
        for number, row in enumerate(columns[tags]):
            word_of = found.word_ids(number)
            is_first = [word is not None and (at == 0 or word_of[at - 1] != word) for at, word in enumerate(word_of)]
            of_rows.append([labels.of(row[word]) if first else IGNORE_INDEX
                            for word, first in zip(word_of, is_first, strict=True)])  # fmt: skip
        return {**found, "labels": of_rows}

    return TaskObjects(
        model=load_model(material, config),
        train=encoded(material.train, encode),
        eval=encoded(material.eval, encode) if len(material.eval) else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=of_spans(labels.names),
        preprocess_logits=best_guess,
        about=f"tags: {shown(labels.names)}",
    )


def _check_lengths(material: TaskSource) -> None:
    for _, rows in material.parts:
        for words, tags in zip(material.column(rows, "words"), material.column(rows, "tags"), strict=True):
            if not isinstance(words, (list, tuple)) or not isinstance(tags, (list, tuple)):
                material.wrong("words and tags must be lists; these are not.", "data", "columns")
            if len(words) != len(tags):
                said = f"{len(words)} words with {len(tags)} tags: {' '.join(map(str, words[:8]))} ..."
                material.wrong(f"a row has {said}", "data", "columns")
