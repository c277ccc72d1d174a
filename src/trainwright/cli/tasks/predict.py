"""`trainwright predict`: labels, scores, numbers, tags or texts of a trained model, one JSON object per row.

Inputs are made as in training, from the same columns; columns with labels may be missing.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, takewhile
from typing import IO, Any, TypeAlias

import torch

from trainwright._types import JSONObject, json_value
from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.tasks.applied import Applied, make_eval_arguments
from trainwright.cli.tasks.chat import rendered_prompt
from trainwright.cli.tasks.conversations import ConversationError, find_shape, read_messages
from trainwright.cli.tasks.mapped_rows import map_row
from trainwright.cli.tasks.models import load_config, load_model, max_length, quiet_transformers
from trainwright.cli.tasks.multi_label import PROBLEM_TYPE
from trainwright.cli.tasks.pairs import check_row, roles_to_predict, score_inputs
from trainwright.cli.tasks.source import Row, TaskSource, file_names, find_format, read_rows, texts
from trainwright.cli.tasks.task_builders import image_processor, image_reader
from trainwright.cli.user_code import load_function
from trainwright.errors import DataError, did_you_mean
from trainwright.hub.access import without_retries

Predict: TypeAlias = Callable[[list[Row]], list[JSONObject]]
Loaded: TypeAlias = Any  # a model or tokenizer of transformers: each class has its own methods
LEAST_SCORE = 0.5  # of a label, where a row may have several
MARKS = 8  # guesses for a masked word
PREFIX = "predicted_"  # of a prediction's column in a table


def predict(one: Applied, *, batch_size: int | None = None, max_new_tokens: int = 64) -> Iterator[JSONObject]:
    """Returns the prediction of each row, in the order of the file.

    Args:
        one: the model and its data.
        batch_size: rows at a time; None for the run's `per_device_eval_batch_size`.
        max_new_tokens: maximum length of a generated text.

    Returns:
        For each row `row` (from 1) and by task `label` or `labels`, `score` and `scores`; `value`; `tags` and
        `scores`; `text`; `answer`; `score`, or `chosen`, `rejected` and `margin`.

    Raises:
        DataError: a column is missing, or a row cannot be read.
    """
    return ({"row": number, **found} for number, _, found in _predict_numbered(one, batch_size, max_new_tokens))


def predict_rows(one: Applied, batch_size: int | None, max_new_tokens: int) -> Iterator[tuple[Row, JSONObject]]:
    """Yields each row and its prediction, as `predict` does."""
    return ((row, found) for _, row, found in _predict_numbered(one, batch_size, max_new_tokens))


def _predict_numbered(
    one: Applied, batch_size: int | None, max_new_tokens: int
) -> Iterator[tuple[int, Row, JSONObject]]:
    """Yields the number of each row in the files, the row, and its prediction."""
    args = make_eval_arguments(one)
    material = TaskSource(one.recipe, one.tree, [], [])
    size = batch_size or args.per_device_eval_batch_size
    rows = _numbered_rows(material)
    first = next(rows, None)
    if first is None:
        raise DataError("There are no rows to predict.")
    _check_columns(material, first[1])
    with quiet_transformers(), without_retries():
        work = _Predictor(material, torch.device(args.device), first[1], max_new_tokens=max_new_tokens)
    every = _chain(first, rows)
    if work.roles:
        every = _checked_pairs(every, material.recipe, work.roles)
    while batch := list(islice(every, size)):
        with torch.no_grad():
            found = work.by_task([row for _, row in batch])
        yield from ((number, row, made) for (number, row), made in zip(batch, found, strict=True))


def write_table(file: IO[str], found: Iterable[tuple[Row, JSONObject]]) -> int:
    """Writes predictions as CSV: the columns of the rows, then those of the predictions; returns the number of rows.

    A column of a prediction has the prefix `predicted_`; of a row that has such a column too, DataError. Lists and
    objects are JSON in their cell.
    """
    pairs = list(found)
    both = sorted({name for row, one in pairs for name in (f"{PREFIX}{key}" for key in one) if name in row})
    if both:
        raise DataError(f"The rows already have the column {both[0]!r}, which a prediction would replace. Rename it.")
    rows = [{**row, **{f"{PREFIX}{name}": value for name, value in one.items()}} for row, one in pairs]
    names = dict.fromkeys(name for row in rows for name in row if not str(name).startswith(PREFIX))
    names |= dict.fromkeys(name for row in rows for name in row)
    writer = csv.writer(file)
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return len(rows)


def _cell(value: object) -> object:
    return json.dumps(json_value(value), ensure_ascii=False) if isinstance(value, (list, tuple, dict)) else value


def _rows(material: TaskSource) -> Iterator[Row]:
    data = material.recipe.data
    for path, shown in file_names(data).items():
        rows = read_rows(path, data, file=shown)
        has_columns = data.pattern is not None or find_format(path, data.format) != "text"
        yield from rows if has_columns else _as_inputs(rows, material)


def _numbered_rows(material: TaskSource) -> Iterator[tuple[int, Row]]:
    """Yields the rows with their numbers in the files, from 1; those that `data.map` leaves out have no prediction."""
    named = material.recipe.data.map
    numbered = enumerate(_rows(material), 1)
    if named is None:
        yield from numbered
        return
    function = load_function(named, entry="data.map")
    for number, row in numbered:
        mapped = map_row(function, row, f"row {number}")
        if mapped is not None:
            yield number, mapped


def _as_inputs(rows: Iterable[Row], material: TaskSource) -> Iterator[Row]:
    """Yields lines of text, which have no column, as rows with the column that the model reads.

    Of a chat, a line is the message of the user.
    """
    if material.recipe.task == "chat":
        columns = material.recipe.data.columns
        role = next((role for role in ("messages", "instruction") if role in columns), "messages")
        for row in rows:
            yield {material.recipe.column(role): [{"role": "user", "content": row["text"]}]}
        return
    role = next((role for role in material.recipe.spec.needs if role in ("text", "source")), "text")
    role = "prompt" if material.recipe.task == "preference" else role
    for row in rows:
        yield {material.recipe.column(role): row["text"]}


def _chain(first: tuple[int, Row], others: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    yield first
    yield from others


def _checked_pairs(
    rows: Iterable[tuple[int, Row]], recipe: Recipe, roles: tuple[str, ...]
) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a task of pairs; DataError with the name of one that lacks an answer or a prompt."""
    for number, row in rows:
        try:
            check_row(recipe, row, roles)
        except ConversationError as error:
            # A row that the user's function made has a number only.
            name = getattr(row, "name", f"row {number}")
            raise DataError(f"{name}: {error}. Fill it in, or remove the row.") from None
        yield number, row


def _check_columns(material: TaskSource, row: Row) -> None:
    """Raises DataError if a column of inputs is missing; labels are not needed."""
    recipe = material.recipe
    inputs = [role for role in recipe.spec.needs if role in ("text", "words", "source", "image")]
    if recipe.task == "preference":
        inputs = ["prompt"]
    if recipe.task == "reward":
        inputs = ["rejected" if recipe.column("chosen") in row else "text"]
    inputs += [role for role in recipe.spec.takes if role == "text_pair" and material.has(role)]
    for role in inputs:
        name = recipe.column(role)
        if name not in row and not (role == "image" and "-" in name):
            there = ", ".join(map(str, list(row)[:20]))
            raise DataError(
                f"There is no column {name!r}, which the model reads as {role}.{did_you_mean(name, list(row))} The "
                f"columns are: {there}. Set the column with --set data.columns.{role}=COLUMN."
            )


class _Predictor:
    """A loaded model, and one method for each task."""

    def __init__(self, material: TaskSource, device: torch.device, first: Row, *, max_new_tokens: int) -> None:
        from transformers import AutoTokenizer

        self._material = material
        self._device = device
        self._max_new_tokens = max_new_tokens
        task = material.recipe.task
        # Columns of a task of pairs, which each row must have.
        self.roles = roles_to_predict(material.recipe, first) if material.recipe.spec.is_paired else ()
        config = load_config(material)
        model: Loaded = load_model(material, config)
        self._model: Loaded = model.to(device).eval()
        self._names: dict[int, str] = config.id2label
        self._has_sets = config.problem_type == PROBLEM_TYPE
        if task == "image-classification":
            self._read_image = image_reader(material, image_processor(material), config)
        else:
            tokenizer: Loaded = AutoTokenizer
            self._tokenizer: Loaded = tokenizer.from_pretrained(material.recipe.model.path, trust_remote_code=False)
            self._length = max_length(material, self._tokenizer, config)
            if self._tokenizer.pad_token_id is None:
                self._tokenizer.pad_token = self._tokenizer.eos_token
        self.by_task: Predict = getattr(self, f"_{task.replace('-', '_')}")

    def _preference(self, rows: list[Row]) -> list[JSONObject]:
        cells = self._cells(rows, "prompt")
        if self._material.recipe.data.pairs != "messages":
            # In training, the text goes on after the prompt, so that no token closes it.
            return [{"answer": text} for text in self._generated(cells, specials=True, closes=False)]
        try:
            prompts = [rendered_prompt(self._tokenizer, read_messages(cell, "user")) for cell in cells]
        except ConversationError as error:
            raise DataError(f"A row cannot be read as a conversation: {error}.") from None
        return [{"answer": text} for text in self._generated(prompts, specials=False)]

    def _reward(self, rows: list[Row]) -> list[JSONObject]:
        recipe = self._material.recipe
        render = score_inputs(self._tokenizer, recipe)
        if "text" in self.roles:
            scores = self._scores([render(row, "text") for row in rows])
            return [{"score": score} for score in scores]
        found = []
        pairs = zip(*(self._scores([render(row, role) for row in rows]) for role in self.roles[-2:]), strict=True)
        for chosen, rejected in pairs:
            found.append({"chosen": chosen, "rejected": rejected, "margin": chosen - rejected})
        return found

    def _scores(self, given: list[str]) -> list[float]:
        """Returns the scores of texts that have their special tokens already, as the texts of a template have."""
        inputs = self._tokenizer(
            given,
            add_special_tokens=self._material.recipe.data.pairs != "messages",
            truncation=True,
            max_length=self._length,
            padding=True,
            return_tensors="pt",
        )
        inputs.pop("token_type_ids", None)
        scores: list[float] = self._logits(inputs).squeeze(-1).tolist()
        return scores

    def _cells(self, rows: list[Row], role: str) -> list[Any]:
        name = self._material.recipe.column(role)
        return [row.get(name) for row in rows]

    def _logits(self, inputs: Loaded) -> torch.Tensor:
        on_device = {name: value.to(self._device) for name, value in inputs.items()}
        logits: torch.Tensor = self._model(**on_device).logits.float().cpu()
        return logits

    def _predict_texts(self, rows: list[Row]) -> torch.Tensor:
        roles = ["text", *(["text_pair"] if self._material.has("text_pair") else [])]
        cells = [texts(self._cells(rows, role)) for role in roles]
        return self._logits(
            self._tokenizer(*cells, truncation=True, max_length=self._length, padding=True, return_tensors="pt")
        )

    def _labelled(self, logits: torch.Tensor) -> list[JSONObject]:
        found = []
        if self._has_sets:
            for scores in logits.sigmoid().tolist():
                named = {self._names[number]: round(score, 6) for number, score in enumerate(scores)}
                chosen = [name for name, score in named.items() if score > LEAST_SCORE]
                found.append({"labels": chosen, "scores": named})
            return found
        for scores in logits.softmax(dim=-1).tolist():
            named = {self._names[number]: round(score, 6) for number, score in enumerate(scores)}
            label = max(named, key=named.__getitem__)
            found.append({"label": label, "score": named[label], "scores": named})
        return found

    def _text_classification(self, rows: list[Row]) -> list[JSONObject]:
        return self._labelled(self._predict_texts(rows))

    def _regression(self, rows: list[Row]) -> list[JSONObject]:
        return [{"value": value} for value in self._predict_texts(rows).squeeze(-1).tolist()]

    def _image_classification(self, rows: list[Row]) -> list[JSONObject]:
        pixels = torch.stack([torch.as_tensor(self._read_image(row)) for row in rows])
        return self._labelled(self._logits({"pixel_values": pixels}))

    def _token_classification(self, rows: list[Row]) -> list[JSONObject]:
        words = [[str(word) for word in cell] for cell in self._cells(rows, "words")]
        inputs = self._tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=self._length,
            padding=True,
            return_tensors="pt",
        )
        best = self._logits(inputs).softmax(dim=-1).max(dim=-1)
        found = []
        for number, row in enumerate(words):
            first = {word: at for at, word in reversed(list(enumerate(inputs.word_ids(number)))) if word is not None}
            places = [first.get(word) for word in range(len(row))]  # None if the word was cut off
            tags = [None if at is None else self._names[int(best.indices[number, at])] for at in places]
            scores = [None if at is None else round(float(best.values[number, at]), 6) for at in places]
            found.append({"tags": tags, "scores": scores})
        return found

    def _masked_lm(self, rows: list[Row]) -> list[JSONObject]:
        given = texts(self._cells(rows, "text"))
        mark = self._tokenizer.mask_token
        lacking = next((text for text in given if mark not in text), None)
        if lacking is not None:
            raise DataError(
                f"{lacking[:60]!r} has no masked word. Write {mark} in place of a word for the model to predict."
            )
        inputs = self._tokenizer(given, truncation=True, max_length=self._length, padding=True, return_tensors="pt")
        scores = self._logits(inputs).softmax(dim=-1)
        found = []
        for number, ids in enumerate(inputs["input_ids"]):
            guesses = []
            for at in (ids == self._tokenizer.mask_token_id).nonzero().flatten().tolist():
                best = scores[number, at].topk(min(MARKS, scores.shape[-1]))
                tokens = [self._tokenizer.decode([token]).strip() for token in best.indices.tolist()]
                values = [round(score, 6) for score in best.values.tolist()]
                guesses.append([{"token": token, "score": score} for token, score in zip(tokens, values, strict=True)])
            text = given[number]
            for guess in guesses:
                text = text.replace(mark, guess[0]["token"], 1)
            found.append({"text": text, "guesses": guesses})
        return found

    def _seq2seq(self, rows: list[Row]) -> list[JSONObject]:
        given = texts(self._cells(rows, "source"))
        return [{"text": text} for text in self._generated(given, specials=True)]

    def _causal_lm(self, rows: list[Row]) -> list[JSONObject]:
        return [{"text": text} for text in self._generated(texts(self._cells(rows, "text")), specials=False)]

    def _chat(self, rows: list[Row]) -> list[JSONObject]:
        recipe = self._material.recipe
        shape = find_shape(recipe, list(dict.fromkeys([*rows[0], recipe.column("output")])))
        if shape is None:
            raise DataError(
                f"No column has conversations: {', '.join(map(str, rows[0]))}. Set the column with --set "
                "data.columns.messages=COLUMN, or data.columns.instruction=COLUMN."
            )
        try:
            prompts = [rendered_prompt(self._tokenizer, shape.prompt(row)) for row in rows]
        except ConversationError as error:
            raise DataError(f"A row cannot be read as a conversation: {error}.") from None
        return [{"answer": text} for text in self._generated(prompts, specials=False)]

    def _num_closing(self) -> int:
        """Returns how many special tokens the tokenizer puts at the end of a text."""
        marks = self._tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        return len(list(takewhile(bool, reversed(marks))))

    def _generated(self, prompts: list[str], *, specials: bool, closes: bool = True) -> list[str]:
        """Returns the text generated after each prompt, or from it; the same in each call.

        A text is shorter than `max_new_tokens` if the prompt leaves less room; a prompt that leaves none is cut.
        With `specials`, the tokenizer adds its special tokens; without `closes`, a decoder's prompts lack those at the
        end.
        """
        config = self._model.config
        is_decoder = not config.is_encoder_decoder
        self._tokenizer.padding_side = self._tokenizer.truncation_side = "left" if is_decoder else "right"
        if is_decoder:
            prompts = [prompt or self._first_text(specials=specials) for prompt in prompts]
        encode = partial(
            self._encode_prompts, prompts, specials=specials, num_closing=0 if closes else self._num_closing()
        )
        inputs = encode(self._length)
        num_new = self._max_new_tokens
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if is_decoder and positions is not None and inputs["input_ids"].shape[1] + num_new > positions:
            if len(prompts) > 1:
                # Together, the longest prompt would leave less room for all.
                alone = (self._generated([prompt], specials=specials, closes=closes) for prompt in prompts)
                return [text for texts_of_one in alone for text in texts_of_one]
            if inputs["input_ids"].shape[1] >= positions:
                inputs = encode(max(positions - num_new, positions // 2))
            num_new = min(num_new, positions - inputs["input_ids"].shape[1])
        ids = self._model.generate(
            **inputs,
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        new = ids[:, inputs["input_ids"].shape[1] :] if is_decoder else ids
        decoded: list[str] = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return decoded

    def _first_text(self, *, specials: bool) -> str:
        """Returns what stands in for an empty prompt, from which a model cannot go on: the token that begins a text."""
        if self._tokenizer("", add_special_tokens=specials)["input_ids"]:
            return ""
        first = self._tokenizer.bos_token or self._tokenizer.eos_token
        if first is None:
            raise DataError("A row is empty, and the tokenizer has no token that begins a text. Remove the row.")
        return str(first)

    def _encode_prompts(
        self, prompts: list[str], length: int, *, specials: bool, num_closing: int
    ) -> dict[str, torch.Tensor]:
        """Returns the inputs of at most `length` tokens each; the closing tokens do not count, and are taken off."""
        inputs = self._tokenizer(
            prompts,
            add_special_tokens=specials,
            truncation=True,
            max_length=length + num_closing,
            padding=True,
            return_tensors="pt",
        )
        inputs.pop("token_type_ids", None)
        return {name: value[:, : value.shape[1] - num_closing].to(self._device) for name, value in inputs.items()}
