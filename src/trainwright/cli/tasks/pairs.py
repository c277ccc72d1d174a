"""Pairs of answers of which one is preferred: rows of text or of messages, as TRL takes them, that keep their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainwright._types import JSONObject, counted
from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.tasks.chat import end_tokens, use_template
from trainwright.cli.tasks.conversations import ConversationError, is_conversation, read_messages
from trainwright.cli.tasks.findings import described
from trainwright.cli.tasks.models import load_config, load_model, load_reference, load_tokenizer, max_length
from trainwright.cli.tasks.source import Row, Rows, TaskSource
from trainwright.cli.tasks.task_objects import TaskObjects, make_origin
from trainwright.config.arguments import TrainingArguments
from trainwright.support.findings import Finding

logger = logging.getLogger(__name__)

ROW_COLUMN = "trainwright_row"  # place of a pair among the rows, until TRL has left out what is too long
NO_PROMPT = "both answers share no first message, which would be their prompt, and no column has one"
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "text": "assistant"}


def preference(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a preference."""
    objects = _pair_objects(material, args)
    part = material.recipe.preference
    if part is None or part.reference is None:
        return objects
    return replace(objects, reference=load_reference(material, part.reference))


def reward(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a model that scores."""
    return _pair_objects(material, args, num_labels=1)


def _pair_objects(material: TaskSource, args: TrainingArguments, **settings: object) -> TaskObjects:
    is_chat = has_messages(material)
    rows = {name: _read(material, part, name, is_chat=is_chat) for name, part in material.parts}

    def corpus() -> Iterator[str]:
        for row in rows["train"]:
            for cell in row.values():
                yield from (str(turn["content"]) for turn in cell) if isinstance(cell, list) else [str(cell)]

    tokenizer = load_tokenizer(material, args, corpus)
    if material.recipe.model.learn_tokenizer is not None:
        _end_no_text(tokenizer)
    num_added = use_template(material, tokenizer) if is_chat else 0
    if tokenizer.eos_token is None:
        material.wrong("this tokenizer has no token that ends a text (eos_token).", "model", "tokenizer")
    config = load_config(material, tokenizer, **settings)
    if config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    cast(Any, args).max_length = max_length(material, tokenizer, config)
    model = load_model(material, config)
    _fit_to(model, tokenizer, has_new_tokens=num_added > 0, is_chat=is_chat)
    parts = {name: _as_dataset(found) for name, found in rows.items()}
    form = "messages" if is_chat else "text"
    return TaskObjects(
        model=model,
        train=parts["train"],
        eval=parts.get("eval"),
        processing_class=tokenizer,
        pairs=form,
        about=f"pairs of {form}",
    )


def prompt_column(recipe: Recipe, names: Sequence[str]) -> str | None:
    """Returns the column of prompts; None if both answers begin with theirs."""
    name = recipe.column("prompt")
    return name if name in names or "prompt" in recipe.data.columns else None


def column_names(rows: Rows) -> list[str]:
    """Returns the columns of some rows."""
    return list(rows.column_names) if hasattr(rows, "column_names") else list(rows[0])


def has_messages(material: TaskSource) -> bool:
    """Returns whether pairs are of messages: the file says so, or names a chat template, or a cell has some."""
    data = material.recipe.data
    if data.pairs is not None:
        return data.pairs == "messages"
    if data.chat_template is not None:
        return True
    return any(
        is_conversation(cell)
        for _, rows in material.parts
        for role in ("chosen", "rejected")
        for cell in material.column(rows, role)
    )


def _read(material: TaskSource, rows: Rows, part: str, *, is_chat: bool) -> list[JSONObject]:
    """Returns the pairs as TRL takes them; adds the findings in them."""
    name = prompt_column(material.recipe, column_names(rows))
    roles = {"chosen": material.recipe.column("chosen"), "rejected": material.recipe.column("rejected")}
    roles = roles if name is None else {"prompt": name, **roles}
    found: list[JSONObject] = []
    equal: list[int] = []
    wrong: dict[str, list[int]] = {}
    asks_for_prompt = is_chat and name is None and material.recipe.task == "preference"
    for place, cells in enumerate(zip(*(_cells(rows, column) for column in roles.values()), strict=True)):
        try:
            pair = {role: read_cell(cell, role, is_chat=is_chat) for role, cell in zip(roles, cells, strict=True)}
        except ConversationError as error:
            wrong.setdefault(str(error), []).append(place)
            continue
        if asks_for_prompt and _has_no_prompt(pair):
            wrong.setdefault(NO_PROMPT, []).append(place)
            continue
        if pair["chosen"] == pair["rejected"]:
            equal.append(place)
        found.append({**pair, ROW_COLUMN: place})
    table = material.table(part, rows)
    problems = [
        f"data.columns: {table.listed(places)} of {table.part}: {problem}. Correct the rows, or remove them."
        for problem, places in wrong.items()
    ]
    material.tree.refuse([(("data", "columns"), problem) for problem in problems])
    if equal:
        material.found.append(
            Finding(
                "warning",
                f"both answers are equal in {counted(len(equal), 'pair')} of {table.part}, which teach nothing: "
                f"{table.listed(equal)}.",
                "Remove them.",
                check="pairs",
                rows=table.names(equal),
                entry="data.columns.rejected",
            )
        )
    return found


def _cells(rows: Rows, name: str) -> list[Any]:
    return list(rows[name]) if hasattr(rows, "column_names") else [row.get(name) for row in rows]


def _has_no_prompt(pair: Mapping[str, Any]) -> bool:
    """Returns whether two conversations share no message before an answer, which TRL takes for their prompt."""
    chosen = pair["chosen"]
    rejected = pair["rejected"]
    return min(len(chosen), len(rejected)) < 2 or chosen[0] != rejected[0]


def read_cell(cell: object, role: str, *, is_chat: bool) -> str | list[JSONObject]:
    """Returns the text or the messages of a cell; ConversationError if it has none."""
    return _as_messages(cell, role) if is_chat else _as_text(cell, role)


def _as_text(cell: object, role: str) -> str:
    if cell is not None and not isinstance(cell, str):
        raise ConversationError(f"the column {role} has {cell!r:.60}, which is not text")
    if cell is None or not (cell.strip() or role == "prompt"):
        raise ConversationError(f"the column {role} has no text")
    return cell


def _as_messages(cell: object, role: str) -> list[JSONObject]:
    found: list[JSONObject] = list(read_messages(cell, ROLES[role]))
    if not found or not any(turn.get("content") or turn.get("tool_calls") for turn in found):
        raise ConversationError(f"the column {role} has no message")
    return found


def _end_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets a tokenizer that was learned here end no text by itself: TRL puts the end after an answer."""
    from tokenizers import processors

    begin = tokenizer.bos_token
    backend: Any = tokenizer
    backend.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.bos_token_id)]
    )


def _fit_to(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, has_new_tokens: bool, is_chat: bool) -> None:
    embeddings: Any = model.get_input_embeddings()
    if has_new_tokens and embeddings.num_embeddings < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer))
    generation: Any = getattr(model, "generation_config", None)
    if is_chat and generation is not None:
        generation.eos_token_id = end_tokens(tokenizer)


def _as_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([dict(row) for row in rows])


def name_pairs(material: TaskSource, part: str, dataset: Any, *, length: int, keeps_end: bool = False) -> Any:
    """Returns TRL's samples with the names of their rows; adds and shows a finding with the pairs that TRL left out.

    Args:
        material: the rows; receives the finding.
        part: `train` or `eval`.
        dataset: the samples, with the places of their rows.
        length: tokens of a pair, beyond which TRL leaves it out, or cuts it.
        keeps_end: whether it cuts at the beginning.

    Raises:
        RecipeError: no pair is left.
    """
    rows = dict(material.parts)[part]
    part = material.part_name(part)
    places = dataset[ROW_COLUMN][:]
    if not places:
        asked = material.recipe.data.max_length
        limit = f"{length} tokens" if asked is None else f"the {length} tokens of data.max_length"
        material.wrong(f"all {counted(len(rows), 'pair')} of {part} are longer than {limit}.", "data", "max_length")
    _look_at_tokens(material, part, rows, dataset, slice(-length, None) if keeps_end else slice(length))
    named = dataset.remove_columns(ROW_COLUMN)
    named.origin = make_origin(material, rows, places)
    left_out = len(rows) - len(places)
    if left_out:
        finding = Finding(
            "warning",
            f"{counted(left_out, 'pair')} of {part} longer than {length} tokens left out by TRL.",
            "Raise data.max_length.",
            check="cut_texts",
            entry="data.max_length",
        )
        _add_late(material, finding)
    return named


def _look_at_tokens(material: TaskSource, part: str, rows: Rows, dataset: Any, shown: slice) -> None:
    """Adds and shows a finding with pairs whose answers differ as texts and not as tokens; RecipeError if all do.

    `shown` are the tokens that TRL leaves of a prompt and its answer.
    """
    names = [name for name in (ROW_COLUMN, "prompt_ids", "chosen_ids", "rejected_ids") if name in dataset.column_names]
    if "chosen_ids" not in names:
        return
    texts = [_cells(rows, material.recipe.column(role)) for role in ("chosen", "rejected")]
    places = []
    is_cut = False
    for place, *prompt, chosen, rejected in zip(*(dataset[name][:] for name in names), strict=True):
        before = prompt[0] if prompt else []
        if (before + chosen)[shown] == (before + rejected)[shown] and texts[0][place] != texts[1][place]:
            places.append(place)
            is_cut = is_cut or chosen != rejected
    if not places:
        return
    table = material.table(part, rows)
    said = f"have the same tokens in {counted(len(places), 'pair')} of {table.part}, which teach nothing"
    cure = "The tokenizer does not tell the words apart; text pairs begin with a space if the prompt ends without one."
    if is_cut:
        cure = "TRL cuts prompts and answers to the same tokens: raise data.max_length."
    if len(places) == len(dataset):
        material.wrong(f"both answers {said}. {cure}", "data", "max_length" if is_cut else "columns")
    listed = table.listed(sorted(places))
    _add_late(
        material,
        Finding(
            "warning", f"both answers {said}: {listed}.", cure, check="pairs", rows=table.names(places), entry="data"
        ),
    )


def _add_late(material: TaskSource, finding: Finding) -> None:
    """Adds a finding; a training shows it at once, since the others are shown before the trainer is made."""
    material.found.append(finding)
    if not material.is_check:
        logger.warning(described(finding))


def roles_to_predict(recipe: Recipe, first: Row) -> tuple[str, ...]:
    """Returns the roles of the columns that a prediction reads, by the first row: of pairs, or of single answers."""
    if recipe.task == "preference":
        return ("prompt",)
    answers = ("chosen", "rejected") if recipe.column("chosen") in first else ("text",)
    return answers if prompt_column(recipe, list(first)) is None else ("prompt", *answers)


def check_row(recipe: Recipe, row: Row, roles: Sequence[str]) -> None:
    """Raises ConversationError if a row lacks what a run of these pairs reads, as its training and `eval` do."""
    for role in roles:
        read_cell(row.get(recipe.column(role)), role, is_chat=recipe.data.pairs == "messages")


def score_inputs(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Callable[[Row, str], str]:
    """Returns the function that makes the text of an answer with its prompt, as a reward model was trained on.

    The rows have passed `check_row`.
    """
    is_chat = recipe.data.pairs == "messages"

    def render(row: Row, role: str) -> str:
        prompt = row.get(recipe.column("prompt"))
        answer = row.get(recipe.column(role))
        if is_chat:
            turns = [] if prompt is None else read_messages(prompt, "user")
            turns = [*turns, *read_messages(answer, "assistant")]
            return cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
        text = f"{prompt or ''}{answer}"
        return text if text.endswith(str(tokenizer.eos_token)) else f"{text}{tokenizer.eos_token}"

    return render
