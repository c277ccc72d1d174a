"""The rows of a recipe, from files (dicts of columns) or a dataset: filtered, shuffled, held out; and their labels."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeAlias

from trainwright._types import JSONObject, counted
from trainwright.cli.recipe.recipe_reader import files
from trainwright.cli.recipe.schema import DataPart, Recipe
from trainwright.cli.recipe.yaml_tree import Tree
from trainwright.cli.tasks import findings, hold_out
from trainwright.cli.tasks.conversations import Shape, find_shape
from trainwright.cli.tasks.mapped_rows import map_dataset, map_rows
from trainwright.cli.tasks.multi_label import join_columns, read_lists
from trainwright.cli.user_code import load_function
from trainwright.data.identity import SampleId, as_hex, fingerprint
from trainwright.data.row_names import ONE_SOURCE, row_names
from trainwright.errors import DataError, MissingPackageError, RecipeError, did_you_mean, needs_package
from trainwright.hub.access import dataset_problem, offline, without_retries
from trainwright.preflight.row_facts import IN_FULL
from trainwright.preflight.rows import fetch_rows
from trainwright.preflight.table_checks import MOST_LABELS
from trainwright.preflight.tables import Table
from trainwright.support.door import has_halves, parse_json
from trainwright.support.findings import Finding

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

Rows: TypeAlias = Any  # a list of rows, or a datasets.Dataset: both have a length and return rows by number
ModelConfig: TypeAlias = Any  # a configuration of transformers: each kind of model has its own class and fields

EVAL_SPLITS = ("validation", "valid", "dev", "test")
LEAST_OF_SHARE = 0.8  # of the rows that were to be held out; fewer are said
QUICK_BYTES = 64 << 20  # files that are read in seconds


@dataclass
class TaskSource:
    """Data and recipe of a task."""

    recipe: Recipe
    tree: Tree  # places of the entries in the file
    train: Rows
    eval: Rows  # empty if nothing is held out
    shape: Shape | None = None  # for the task chat: the columns of its conversations
    found: list[Finding] = field(default_factory=list)  # findings in the rows
    twice: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by part: file and name of duplicate columns
    has_lists: bool = False  # of labels: a row may have several
    is_check: bool = False  # nothing is trained, so that nothing is written into the output directory
    model: Any = None  # of transformers or peft, if it is loaded already
    is_evaluation: bool = False  # nothing is trained: the rows in `train` are those of a file to evaluate on
    before_map: Rows = ()  # the training rows as `data.map` got them

    @property
    def parts(self) -> list[tuple[str, Rows]]:
        """Returns the parts that have rows, by name."""
        return [(name, rows) for name, rows in (("train", self.train), ("eval", self.eval)) if len(rows)]

    @property
    def notes(self) -> list[str]:
        """Returns the findings in the rows, for the console."""
        return [findings.described(finding) for finding in self.found]

    def part_name(self, part: str) -> str:
        """Returns what messages call the rows of a part."""
        return "eval" if self.is_evaluation else part

    def table(self, part: str, rows: Rows) -> Table:
        """Returns the rows of a part as a table."""
        names: Iterable[str] = ()
        if hasattr(rows, "column_names"):
            names = rows.column_names
        elif len(rows):
            names = rows[0]

        @cache
        def all_names() -> list[SampleId]:
            return self.names(rows)

        return findings.make_table(
            self.recipe,
            self.part_name(part),
            {name: partial(_cells, rows, name) for name in names},
            find_name=lambda place: str(all_names()[place]),
            twice=self.twice.get(part, ()),
            has_lists=self.has_lists,
        )

    def by_source(self) -> dict[str, list[Row]]:
        """Returns the training rows of each source, in the order of the sources."""
        rows: dict[str, list[Row]] = {source["name"]: [] for source in self.recipe.data.sources or ()}
        for row in self.train:
            rows[row.name.source].append(row)
        return rows

    def names(self, rows: Rows) -> list[SampleId]:
        """Returns the names of rows: their positions in the files or the dataset, or the values of `id_column`."""
        column = self.recipe.training.get("id_column")
        if hasattr(rows, "column_names"):
            names = row_names(rows, id_column=column)
            return [names.find_name(number) for number in range(len(rows))]
        if column is None:
            return [row.name for row in rows]
        if len(rows) and column not in rows[0]:
            self.wrong(f"there is no column {column!r}.{did_you_mean(column, list(rows[0]))}", "training", "id_column")
        return [replace(row.name, key=row[column]) for row in rows]

    def wrong(self, problem: str, *path: str) -> NoReturn:
        """Raises a RecipeError that names the entry at `path`."""
        # A command on a model sets the entry with its option `--data`, which the error names already.
        entry = "" if self.is_evaluation and path == ("data", "train") else f"{'.'.join(path)}: "
        self.tree.refuse([(path, f"{entry}{problem}")])
        raise AssertionError

    def column(self, rows: Rows, role: str) -> list[object]:
        """Returns the cells of the column for a role of the task."""
        name = self.recipe.column(role)
        return list(rows[name]) if hasattr(rows, "column_names") else [row.get(name) for row in rows]

    def has(self, role: str) -> bool:
        return role in self.recipe.data.columns


def _cells(rows: Rows, name: str) -> Sequence[object]:
    return list(rows[name]) if hasattr(rows, "column_names") else [row.get(name) for row in rows]


def load(recipe: Recipe, tree: Tree, found: list[Finding] | None = None, *, is_evaluation: bool = False) -> TaskSource:
    """Reads the data of a recipe.

    Args:
        recipe: the recipe.
        tree: tree with the places of its entries.
        found: receives the findings in the rows, including errors.
        is_evaluation: whether the rows of `data.train` are those of a file to evaluate on.

    Raises:
        RecipeError: files or columns are missing, rows cannot be trained on, or no row is left.
    """
    material = TaskSource(recipe, tree, [], [], found=[] if found is None else found, is_check=found is not None)
    material.is_evaluation = is_evaluation
    try:
        if recipe.data.dataset is not None:
            train, held = _load_dataset(recipe.data)
        else:
            names = file_names(recipe.data)
            train = _load_files(material, recipe.data.train, names)
            for source in recipe.data.sources or ():
                train += _load_files(material, source["path"], names, source=source["name"])
            held = None if recipe.data.eval is None else _load_files(material, recipe.data.eval, names, source="eval")
    except (DataError, MissingPackageError) as error:
        material.wrong(str(error), "data", "train" if recipe.data.dataset is None else "dataset")
    train = _map(material, "train", train)
    held = None if held is None else _map(material, "eval", held)
    train = _gather_labels(material, train)
    held = None if held is None else _gather_labels(material, held)
    train = _used(material, "train", train)
    held = None if held is None else _used(material, "eval", held)
    wrong = [finding for finding in material.found if finding.severity == "error"]
    tree.refuse([(tuple(finding.entry.split(".")), findings.described(finding)) for finding in wrong])
    train = _shuffled(train, recipe.data.split_seed)
    if held is None and recipe.data.eval_share > 0:
        train, held = _parted(material, train)
    elif held is not None:
        held = _shuffled(held, recipe.data.split_seed)
    material.train = _cut(train, recipe.data.max_train_rows)
    material.eval = _cut([] if held is None else held, recipe.data.max_eval_rows)
    material.found += _held_out(material)
    if len(material.train) == 0:
        if recipe.data.where:
            cause = "where"
        elif recipe.data.dataset is None:
            cause = "train"
        else:
            cause = "dataset"
        material.wrong(f"no row is left to {'evaluate' if is_evaluation else 'train'} on.", "data", cause)
    return material


def find_data_problems(recipe: Recipe, tree: Tree) -> list[tuple[tuple[str, ...], str]]:
    """Returns the problems in the data of a recipe that has other problems; none if the data are slow to read.

    Large files and datasets are not read for it: their problems are reported once the recipe has no others.
    """
    data = recipe.data
    if data.dataset is not None or sum(path.stat().st_size for path in file_names(data)) > QUICK_BYTES:
        return []
    try:
        load(recipe, tree)
    except RecipeError as error:
        return list(error.entries)
    return []


def _map(material: TaskSource, part: str, rows: Rows) -> Rows:
    """Returns the rows after `data.map`; adds a finding with the number of those that it leaves out."""
    named = material.recipe.data.map
    if named is None or len(rows) == 0:
        return rows
    function = load_function(named, entry="data.map")
    if part == "train":
        material.before_map = rows
    try:
        if hasattr(rows, "column_names"):
            mapped = map_dataset(function, rows, material.names(rows))
        else:
            mapped = [FileRow(row, name) for row, name in map_rows(function, rows)]
    except DataError as error:
        material.tree.refuse([(("data", "map"), str(error))])
        raise
    left_out = len(rows) - len(mapped)
    part = material.part_name(part)
    if left_out == len(rows):
        what = "the only row" if left_out == 1 else f"each of the {left_out} rows"
        material.wrong(
            f"{named} returned None for {what} of {part}, so that none is left. Return the row that the function made "
            "(is a return statement missing?), and None only for rows to leave out.",
            "data",
            "map",
        )
    if left_out:
        material.found.append(
            Finding(
                "note",
                f"{counted(left_out, 'row')} of {part} left out by {named} (data.map).",
                check="map",
                entry="data.map",
            )
        )
    return mapped


def _gather_labels(material: TaskSource, rows: Rows) -> Rows:
    """Returns the rows with a list of labels each, if they have several; otherwise as they are."""
    recipe = material.recipe
    if not recipe.spec.takes_lists or len(rows) == 0:
        return rows
    named = recipe.data.columns.get("label", "label")
    there = list(rows.column_names) if hasattr(rows, "column_names") else list(rows[0])
    columns = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    missing = next((name for name in columns if name not in there), None)
    if missing is not None:
        if isinstance(named, list):
            hint = did_you_mean(missing, there)
            material.wrong(f"there is no column {missing!r}.{hint}", "data", "columns", "label")
        return rows
    # Rows that are not used may lack labels.
    where = {name: value for name, value in recipe.data.where.items() if name in there and name not in columns}
    rows = _at(rows, _chosen(rows, where)) if where else rows
    if len(rows) == 0:
        return rows
    find_name = material.table("train", rows).find_name
    try:
        if isinstance(named, list):
            lists: list[list[str]] | None = join_columns({name: _cells(rows, name) for name in columns}, find_name)
        else:
            lists = read_lists(_cells(rows, columns[0]), find_name)
    except DataError as error:
        material.wrong(str(error), "data", "columns", "label")
    if lists is None:
        return rows
    material.has_lists = True
    given = recipe.data.labels
    left_out = {str(value) for value, name in given.items() if name is None} if isinstance(given, dict) else set()
    lists = [[label for label in row if label not in left_out] for row in lists]
    column = recipe.column("label")
    if hasattr(rows, "column_names"):
        kept = rows.remove_columns(column) if column in rows.column_names else rows
        return kept.add_column(column, lists)
    return [FileRow({**row, column: found}, row.name) for row, found in zip(rows, lists, strict=True)]


def _used(material: TaskSource, part: str, rows: Rows) -> Rows:
    """Returns the rows selected by `where` that are, for a chat, conversations; adds the findings in them."""
    _check_columns(material, rows)
    if material.recipe.data.where:
        rows = _at(rows, _chosen(rows, material.recipe.data.where))
    rows = _without_left_out(material, part, rows)
    if len(rows) == 0:
        return rows
    if material.recipe.data.map is not None and part == "train" and not material.is_evaluation:
        _note_equal_rows(material, rows)
    table = material.table(part, rows)
    if material.shape is None:
        material.found += findings.find(material.recipe, table)
        return rows
    places, found = findings.check_conversations(material.shape, table)
    material.found += found
    return _at(rows, places)


def _note_equal_rows(material: TaskSource, rows: Rows) -> None:
    """Adds a finding if the function of `data.map` left nothing in which the training rows differ for the model."""
    there = rows.column_names if hasattr(rows, "column_names") else rows[0]
    names = [name for name in _inputs(material) if name in there or is_range(name)]
    if not _are_equal(rows, names) or _are_equal(material.before_map, names):
        return
    columns = f"column{'s' * (len(names) > 1)} {', '.join(names)}"
    material.found.append(
        Finding(
            "error",
            f"after {material.recipe.data.map}, all {len(rows)} training rows are equal in the "
            f"{columns}, so that a model cannot tell them apart.",
            "Return a changed copy of the row that the function gets.",
            check="map",
            entry="data.map",
        )
    )


def _are_equal(rows: Rows, names: Sequence[str]) -> bool:
    """Returns whether several rows have the same contents in these columns; False if it lacks them, or for images."""
    contents = set(_contents(rows, names))
    return len(rows) > 1 and len(contents) == 1 and None not in contents


def _without_left_out(material: TaskSource, part: str, rows: Rows) -> Rows:
    """Returns the rows without those of a label that `data.labels` maps to null; adds a finding with their number."""
    given = material.recipe.data.labels
    left_out = {str(value) for value, name in given.items() if name is None} if isinstance(given, dict) else set()
    if not left_out or "label" not in material.recipe.spec.needs or material.has_lists:
        return rows
    cells = material.column(rows, "label")
    there = {str(cell) for cell in cells}
    if part == "train" and not material.is_evaluation and (absent := sorted(left_out - there)):
        hint = did_you_mean(absent[0], there, quoted=True)
        material.wrong(
            f"no row has the label {absent[0]!r}, which data.labels leaves out (null).{hint}", "data", "labels"
        )
    places = [place for place, cell in enumerate(cells) if str(cell) not in left_out]
    number = len(cells) - len(places)
    named = ", ".join(sorted(left_out))
    if number and not places and (part == "train" or material.recipe.data.eval is not None):
        which = "the only row" if number == 1 else f"each of the {number} rows"
        material.wrong(
            f"{which} of {material.part_name(part)} has a label that data.labels leaves out (null: {named}), so that "
            "none is left. Name another file, or give the label a name in data.labels.",
            "data",
            "labels",
        )
    if number:
        is_one = number == 1
        material.found.append(
            Finding(
                "note",
                f"{counted(number, 'row')} of {material.part_name(part)} with the label {named} "
                f"{'is' if is_one else 'are'} left out, as data.labels says (null).",
                check="labels",
                entry="data.labels",
            )
        )
    return _at(rows, places)


def _inputs(material: TaskSource) -> list[str]:
    """Returns the columns that a model reads."""
    recipe = material.recipe
    shape = material.shape
    roles = [role for role in (*recipe.spec.needs, *recipe.spec.takes) if role not in findings.ANSWERS]
    return list(map(recipe.column, roles)) if shape is None else list(shape.columns.values())


def _parted(material: TaskSource, rows: Rows) -> tuple[Rows, Rows]:
    """Returns the rows to train on and those to hold out, both in the order in which they came."""
    data = material.recipe.data
    number = len(rows)
    keys = [_contents(rows, _inputs(material))]
    if material.recipe.spec.is_paired:
        # Answers to one prompt would tell what is preferred of the others.
        keys.append(_contents(rows, [material.recipe.column("prompt")]))
    keys += [_plain(_cells(rows, data.split_by))] if data.split_by else []
    strata = _plain(_cells(rows, data.stratify)) if data.stratify else None
    chosen = hold_out.choose(data.eval_share, number, *keys, strata=strata)
    wanted = int(number * data.eval_share)
    if len(chosen) < wanted * LEAST_OF_SHARE:
        entry = "data.split_by" if data.split_by else "data.eval_share"
        cause = f"with the same {data.split_by!r}, or equal ones," if data.split_by else "that are equal"
        material.found.append(
            Finding(
                "warning",
                f"{counted(len(chosen), 'row')} of {number} {'is' if len(chosen) == 1 else 'are'} held out instead of "
                f"{wanted}: rows {cause} stay on one side, and the other groups are too large.",
                "Raise data.eval_share, or name evaluation rows with data.eval.",
                check="hold_out",
                entry=entry,
            )
        )
    is_held = bytearray(number)
    for place in chosen:
        is_held[place] = 1
    return _at(rows, [place for place in range(number) if not is_held[place]]), _at(rows, chosen)


def _contents(rows: Rows, names: Sequence[str]) -> list[int | None]:
    """Returns for each row what tells equal ones; None for rows without a content of their own, such as images."""
    has_columns = hasattr(rows, "column_names")
    first = rows[0] if len(rows) and not has_columns else {}
    named = rows.column_names if has_columns else list(first)
    wanted = [one for name in names for one in (_within(name, named) if is_range(name) else [name])]
    there = [name for name in wanted if name in named and (not has_columns or _is_plain(rows, name))]
    columns = [_cells(rows, name) for name in there if len(rows)]
    return [_content(cells) for cells in zip(*columns, strict=True)] if columns else [None] * len(rows)


def _is_plain(rows: Rows, name: str) -> bool:
    """Returns True for a column of a dataset with texts, numbers or lists of them, which are read without decoding."""
    return type(rows.features[name]).__name__ in ("Value", "ClassLabel", "List", "Sequence")


def _within(name: str, columns: Sequence[str]) -> list[str]:
    """Returns the columns that a range means."""
    first, _, last = name.partition("-")
    return [one for one in columns if one.isdigit() and int(first) <= int(one) <= int(last)]


def digest_rows(rows: Rows) -> str:
    """Returns what tells these rows from others, whatever their order; of a dataset, its own fingerprint."""
    if hasattr(rows, "column_names"):
        return str(getattr(rows, "_fingerprint", len(rows)))
    contents = sorted(_content(tuple(row.items())) or 0 for row in rows)
    return f"{len(rows)}-{as_hex(fingerprint(contents))}"


def _content(cells: tuple[object, ...]) -> int | None:
    try:
        return fingerprint(cells)
    except DataError:
        return None


def _plain(cells: Sequence[object]) -> list[int | None]:
    return [None if cell is None or cell != cell else _content((cell,)) for cell in cells]  # NaN is no value either


def _held_out(material: TaskSource) -> Iterator[Finding]:
    """Yields a finding if held-out rows are also in the training rows."""
    names = _inputs(material)
    parts = [fetch_rows(rows, IN_FULL, find_name=material.table(part, rows).find_name) for part, rows in material.parts]
    if len(parts) == 2:
        train, rows = parts
        if train is not None and rows is not None:
            yield from findings.held_out(train, rows, names)


def _at(rows: Rows, places: list[int]) -> Rows:
    """Returns the rows at some positions, from 0."""
    if len(places) == len(rows):
        return rows
    return rows.select(places) if hasattr(rows, "column_names") else [rows[place] for place in places]


def _paths(named: str | Sequence[str] | None) -> list[Path]:
    """Returns the files named by an entry of a recipe."""
    return [path for one in ([named] if isinstance(named, str) else named or ()) for path in files(one)]


def file_names(data: DataPart) -> dict[Path, str]:
    """Returns the displayed name of each file: without its directory, unless another file has the same name."""
    named = [data.train, data.eval, *(source["path"] for source in data.sources or ())]
    paths = list(dict.fromkeys(path for one in named for path in _paths(one)))
    uses = Counter(path.name for path in paths)
    return {path: path.name if uses[path.name] == 1 else path.as_posix() for path in paths}


def _load_files(
    material: TaskSource, named: str | Sequence[str] | None, names: Mapping[Path, str], *, source: str = ONE_SOURCE
) -> list[FileRow]:
    return [row for path in _paths(named) for row in _load_file(material, path, file=names[path], source=source)]


def _load_file(material: TaskSource, path: Path, *, file: str, source: str) -> list[FileRow]:
    """Reads a file; if it is not UTF-8 and the recipe sets no encoding, in the encoding that its bytes suggest."""
    data = material.recipe.data
    try:
        rows = list(read_rows(path, data, file=file, source=source))
    except DataError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError) or data.encoding is not None:
            raise
        data = replace(data, encoding=_encoding(path))
        try:
            rows = list(read_rows(path, data, file=file, source=source))
        except DataError:
            raise error from None
        material.found.append(
            Finding(
                "note",
                f"{path} is not UTF-8 and is read as {data.encoding}; data.encoding sets another.",
                check="encoding",
                entry="data.encoding",
            )
        )
    twice = [(file, name) for name in columns_twice(path, data)]
    material.twice.setdefault("eval" if source == "eval" else "train", []).extend(twice)
    return rows


def _encoding(path: Path) -> str:
    """Guesses the encoding of a file: by its first bytes, by charset_normalizer if installed, else Windows' own."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
    try:
        from charset_normalizer import from_path
    except ImportError:
        return "cp1252"
    best = from_path(path).best()
    return "cp1252" if best is None else best.encoding


def _load_dataset(data: DataPart) -> tuple[Rows, Rows | None]:
    with needs_package("data.dataset needs the package datasets: pip install datasets"):
        import datasets
    assert data.dataset is not None
    is_here = Path(data.dataset).is_dir()
    why = None if is_here else dataset_problem(data.dataset)  # the package retries for half a minute
    try:
        is_saved = is_here and any(Path(data.dataset).glob("*.json"))
        with without_retries(), nullcontext() if why is None else offline(datasets.config):
            if is_saved:
                found = datasets.load_from_disk(data.dataset)
            else:
                found = datasets.load_dataset(data.dataset, data.subset, trust_remote_code=False)
    except Exception as error:  # whatever the package raises, this dataset is unusable
        raise DataError(why or f"{data.dataset} could not be loaded: {error}") from None
    if isinstance(found, datasets.Dataset):
        return found, None
    train = data.train if isinstance(data.train, str) else "train"
    held = data.eval if isinstance(data.eval, str) else next((name for name in EVAL_SPLITS if name in found), None)
    for name in (train, held):
        if name is not None and name not in found:
            raise DataError(f"it has no split {name!r}.{did_you_mean(name, list(found))} Splits: {', '.join(found)}.")
    return found[train], None if held is None else found[held]


def _check_columns(material: TaskSource, rows: Rows) -> None:
    recipe = material.recipe
    if len(rows) == 0:
        return
    there = list(rows.column_names) if hasattr(rows, "column_names") else list(rows[0])
    if recipe.task == "chat":
        material.shape = find_shape(recipe, there)
        if material.shape is None:
            said = f"no column has conversations: {', '.join(there[:20])}. Set it, as {{messages: COLUMN}} or as"
            material.wrong(f"{said} {{instruction: COLUMN, output: COLUMN}}.", "data", "columns")
    roles = (*recipe.spec.needs, *(role for role in recipe.spec.takes if material.has(role)))
    asked = [("columns", role, recipe.column(role)) for role in roles]
    asked = [one for one in asked if one[1] != "image" or not is_range(one[2])]
    problems: list[tuple[tuple[str, ...], str]] = []
    for part, entry, name in (*asked, *(("where", str(name), name) for name in recipe.data.where)):
        if name not in there:
            said = f"there is no column {name!r}.{did_you_mean(name, there)} The columns are: {', '.join(there[:20])}."
            cure = f" Set data.columns.{entry} to yours." if part == "columns" and not material.has(entry) else ""
            problems.append((("data", part, entry), f"data.{part}.{entry}: {said}{cure}"))
    for entry, chosen in (("split_by", recipe.data.split_by), ("stratify", recipe.data.stratify)):
        is_missing = chosen is not None and chosen not in there
        if is_missing and not hasattr(rows, "column_names"):  # the first row of a JSON file need not have all
            is_missing = not any(chosen in row for row in rows)
        if is_missing and recipe.data.eval is None:
            said = (
                f"there is no column {chosen!r}.{did_you_mean(chosen, there)} The columns are: {', '.join(there[:20])}."
            )
            problems.append((("data", entry), f"data.{entry}: {said}"))
    material.tree.refuse(problems)


def is_range(name: str) -> bool:
    """Returns whether a name means several columns, such as `0-63`."""
    first, sign, last = name.partition("-")
    return bool(sign) and first.isdigit() and last.isdigit()


def _chosen(rows: Rows, where: JSONObject) -> list[int]:
    """Returns the positions of the rows in which the columns have the values."""
    wanted = {name: _values([value]) for name, value in where.items()}
    shown = rows.select_columns(list(wanted)) if hasattr(rows, "column_names") else rows
    return [
        number
        for number, row in enumerate(shown)
        if all(str(row.get(name)) in values for name, values in wanted.items())
    ]


def _shuffled(rows: Rows, seed: int) -> Rows:
    """Shuffles rows, since tables are often sorted by label."""
    if hasattr(rows, "column_names"):
        return rows.shuffle(seed=seed)
    return random.Random(seed).sample(rows, k=len(rows))


def _taken(rows: Rows, start: int, end: int) -> Rows:
    return rows.select(range(start, end)) if hasattr(rows, "column_names") else rows[start:end]


def _cut(rows: Rows, most: int | None) -> Rows:
    return rows if most is None or len(rows) <= most else _taken(rows, 0, most)


def first_line(error: BaseException) -> str:
    """Returns the first line of another package's error; the rest is usually advice about its own functions."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def texts(cells: Iterable[object]) -> list[str]:
    """Converts cells to text; empty ones to empty text."""
    return ["" if cell is None else str(cell) for cell in cells]


Row = dict[str, Any]  # Any: a cell of a table
Numbered: TypeAlias = "Iterator[tuple[int | None, Row]]"  # (line at which a row begins, None without lines; the row)


class FileRow(Row):
    """A row of a file, with its name."""

    __slots__ = ("name",)

    def __init__(self, row: Row, name: SampleId) -> None:
        super().__init__(row)
        self.name = name


SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".conll": "conll",
    ".conllu": "conll",
    ".bio": "conll",
}
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MAX_CELL = 1 << 25  # characters: a text may be a whole book
MAX_HEADER = 1 << 20
MAX_WHOLE = 1 << 31  # of a file that is read at once
MAX_UNPACKED = 1 << 28  # bytes that any packed file may have, beyond so many times its own
MOST_TIMES = 100
MAX_DIGITS = 4000  # of a number in a row; Python reads a few more


def read_rows(path: Path, data: DataPart, *, file: str | None = None, source: str = ONE_SOURCE) -> Iterator[FileRow]:
    """Yields the rows of a file, or the images of a directory.

    Args:
        path: the file.
        data: how to read it.
        file: name of the file in the names of the rows; None for the last part of the path.
        source: name of the rows' dataset.

    Raises:
        DataError: the file is not of the type given by its suffix (or `format`).
    """
    kind = find_format(path, data.format)
    shown = path.name if file is None else file
    try:
        for number, (line, row) in enumerate(READERS[kind](path, data)):
            key = str(Path(row["image"]).relative_to(path)) if kind == "images" else None
            place = number if line is None else line
            yield FileRow(row, SampleId(source, place, shown, is_line=line is not None, key=key))
    except UnicodeDecodeError as error:
        name = data.encoding or "UTF-8"
        raise DataError(f"{path} is not text in {name}: {error}. Set its encoding with data.encoding.") from error


def find_format(path: Path, given: str | None) -> str:
    """Returns the format of a file; DataError if neither the suffix nor the user gives it."""
    if given is not None:
        return given
    if path.is_dir():
        return "images"
    found = next((SUFFIXES[suffix] for suffix in reversed(path.suffixes) if suffix in SUFFIXES), None)
    if found is None:
        raise DataError(f"{path}: unknown suffix. Set the format with data.format: {', '.join(READERS)}.")
    return found


def _open(path: Path, data: DataPart) -> IO[str]:
    """Opens a file as text; DataError if it is a pipe or a device, on which a reader may wait for ever."""
    _check_kind(path)
    encoding = data.encoding or "utf-8-sig"
    if path.suffix == ".gz":
        limit = MAX_UNPACKED + MOST_TIMES * path.stat().st_size
        unpacked = io.BufferedReader(_Unpacked(path, limit))
        return io.TextIOWrapper(unpacked, encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def _check_kind(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path} is not a regular file. Write its rows to a file, or pass them to standard input (--data -)."
        )


class _Unpacked(io.RawIOBase):
    """The content of a packed file; DataError beyond a number of bytes that no rows of that size make."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._left = limit
        self._file = gzip.GzipFile(path)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:  # Any: a buffer, which has no type in Python 3.11
        """Reads into a buffer, and returns the number of bytes."""
        number = self._file.readinto(buffer)
        self._left -= number
        if self._left < 0:
            raise DataError(f"{self._path} unpacks to more than {MOST_TIMES} times its size. Unpack it to read it.")
        return number

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def _lines(file: IO[str], path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file and their numbers; DataError if one is longer than any text."""
    number = 0
    while line := file.readline(MAX_CELL):
        number += 1
        if len(line) == MAX_CELL:
            raise DataError(f"{path}:{number}: this line has {MAX_CELL} characters or more. Split its text.")
        yield number, line


def _whole(file: IO[str], path: Path) -> str:
    """Returns the text of a file; DataError if it is larger than the memory of most machines."""
    text = file.read(MAX_WHOLE)
    if len(text) == MAX_WHOLE:
        raise DataError(f"{path} has {MAX_WHOLE} characters or more, which are read at once. Write it as JSON lines.")
    return text


def _csv(path: Path, data: DataPart) -> Numbered:
    csv.field_size_limit(MAX_CELL)
    delimiter = data.delimiter or _delimiter(_first_line(path, data))
    with _open(path, data) as file:
        lines = (line for _, line in _lines(file, path))
        reader = csv.reader(lines, delimiter=delimiter)
        try:
            yield from _table(_records(reader), path, has_header=data.header)
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: {error}.") from None


def _first_line(path: Path, data: DataPart) -> str:
    """Returns the first line of a file, as much of it as may be a header."""
    with _open(path, data) as file:
        return file.readline(MAX_HEADER)


def _records(reader: CsvReader) -> Iterator[tuple[int, list[str]]]:
    """Yields the line at which each record begins, and its cells: a quoted text may span several lines."""
    line = 1
    for cells in reader:
        yield line, cells
        line = reader.line_num + 1


def columns_twice(path: Path, data: DataPart) -> list[str]:
    """Returns the names of columns that occur more than once in the first line of a table."""
    kind = find_format(path, data.format)
    if kind not in ("csv", "tsv") or not data.header:
        return []
    line = _first_line(path, data)
    delimiter = data.delimiter or ("\t" if kind == "tsv" else _delimiter(line))
    names = next(csv.reader([line], delimiter=delimiter), [])
    return [name for name, uses in Counter(names).items() if uses > 1 and name.strip()]


def _delimiter(first_line: str) -> str:
    """Returns the delimiter of the first line; a comma if it cannot be determined."""
    try:
        return csv.Sniffer().sniff(first_line, delimiters=",;\t|").delimiter
    except csv.Error:
        return ","


def _tsv(path: Path, data: DataPart) -> Numbered:
    if data.delimiter is not None:
        yield from _csv(path, data)
        return
    with _open(path, data) as file:
        cells = ((number, line.rstrip("\r\n").split("\t")) for number, line in _lines(file, path) if line.strip())
        yield from _table(cells, path, has_header=data.header)


def _table(lines: Iterator[tuple[int, list[str]]], path: Path, *, has_header: bool) -> Numbered:
    names: list[str] | None = None
    for number, cells in lines:
        if not cells:
            continue
        if names is None:
            names = cells if has_header else [str(i) for i in range(len(cells))]
            if has_header:
                continue
        if len(cells) != len(names):
            said = (
                f"{path}:{number}: this line has {counted(len(cells), 'column')}, but earlier lines have {len(names)}."
            )
            raise DataError(f"{said} Quote texts that contain the delimiter, or set data.delimiter.")
        yield number, dict(zip(names, cells, strict=True))


def _json(path: Path, data: DataPart) -> Numbered:
    with _open(path, data) as file:
        try:
            value = _value(_whole(file, path))
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise DataError(
                f"{path} is not JSON: {error}. If each line is one object, set data.format: jsonl."
            ) from None
    if isinstance(value, dict):  # a single list among other values, such as {"version": ..., "data": [...]}
        value = next((inner for inner in value.values() if isinstance(inner, list)), None)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{path} does not contain a list of objects.")
    yield from ((None, row) for row in value)


def _value(text: str) -> object:
    """Returns the value of JSON; ValueError if it is none, or has text that no file can hold."""
    value: object = parse_json(text, max_digits=MAX_DIGITS)
    if "\\u" in text and has_halves(value):
        raise ValueError("it has half of a character (as \\ud83d alone)")
    return value


def _jsonl(path: Path, data: DataPart) -> Numbered:
    with _open(path, data) as file:
        for number, line in _lines(file, path):
            if line.strip():
                try:
                    row = _value(line)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: this is not JSON: {error}.") from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: each line must be an object; this one is not.")
                yield number, row


def _parquet(path: Path, data: DataPart) -> Numbered:
    with needs_package("Parquet needs the package pyarrow: pip install pyarrow"):
        from pyarrow import parquet
    _check_kind(path)
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from ((None, row) for row in batch.to_pylist())


def _text(path: Path, data: DataPart) -> Numbered:
    with _open(path, data) as file:
        whole = _whole(file, path)
    pattern = None
    if data.pattern is not None:
        pattern = re.compile(data.pattern, 0 if data.sample_by == "line" else re.DOTALL)
    for line, part in _parts(whole, data.sample_by):
        if pattern is not None:
            match = pattern.search(part)
            if match is not None:
                yield line + part.count("\n", 0, match.start()), match.groupdict()
        elif text := part.strip():
            blank = part[: len(part) - len(part.lstrip())]
            yield line + blank.count("\n"), {"text": text}


def _parts(whole: str, sample_by: str) -> Iterator[tuple[int, str]]:
    """Yields the lines, the paragraphs or the whole of a text, each with the number of its first line."""
    parts: Iterable[str] = [whole]
    if sample_by == "line":
        parts = whole.splitlines(keepends=True)
    elif sample_by == "paragraph":  # including the blank lines between them, which count as lines
        parts = re.split(r"(\r?\n[ \t]*\r?\n)", whole)
    line = 1
    for part in parts:
        yield line, part.rstrip("\r\n") if sample_by == "line" else part
        line += part.count("\n")


def _conll(path: Path, data: DataPart) -> Numbered:
    """Yields sentences with one word and its tags per line, separated by blank lines, as in CoNLL's tasks."""
    with _open(path, data) as file:
        words: list[list[str]] = []
        first = 1
        for number, line in _lines(file, path):
            cells = line.split("\t") if "\t" in line else line.split()
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                if words:
                    yield first, _sentence(words)
                words = []
            elif not line.startswith(("# ", "-DOCSTART-")):  # a hashtag is a word, and so is "#<tab>O"
                if words and len(cells) != len(words[0]):
                    raise DataError(
                        f"{path}:{number}: this line has {counted(len(cells), 'column')}, but the previous line has "
                        f"{len(words[0])}."
                    )
                first = first if words else number
                words.append(cells)
        if words:
            yield first, _sentence(words)


def _sentence(words: list[list[str]]) -> Row:
    columns = [list(column) for column in zip(*words, strict=True)]
    return {"words": columns[0], "tags": columns[-1], **{str(i): column for i, column in enumerate(columns)}}


def _images(path: Path, data: DataPart) -> Numbered:
    """Yields the images of a directory, with a subdirectory for each label."""
    for image in sorted(path.rglob("*")):
        if image.suffix.lower() in IMAGES and image.is_file():
            yield None, {"image": str(image), "label": image.parent.name}


READERS: dict[str, Callable[[Path, DataPart], Numbered]] = {
    "csv": _csv,
    "tsv": _tsv,
    "json": _json,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "text": _text,
    "conll": _conll,
    "images": _images,
}


@dataclass(frozen=True)
class Labels:
    """Labels of a run, in the order of their numbers, and the number of each cell value (as text)."""

    names: list[str]
    parse_number: dict[str, int]

    def find(self, cell: object) -> int:
        return self.parse_number[str(cell)]

    def mark(self, cells: Iterable[object]) -> list[float]:
        """Returns 1 for each label that is among the cells, and 0 for the others."""
        there = {self.find(cell) for cell in cells}
        return [float(number in there) for number in range(len(self.names))]

    @property
    def for_config(self) -> JSONObject:
        numbered = dict(enumerate(self.names))
        return {"id2label": numbered, "label2id": {name: number for number, name in numbered.items()}}


def find_labels(material: TaskSource, role: str) -> Labels:
    """Returns the labels of a column, as listed in the recipe or as found; RecipeError for an unlisted label.

    A mapping lists what changes: in training, other labels keep their names, after those in the mapping.
    """
    given = material.recipe.data.labels
    if isinstance(given, dict):
        # A label that is mapped to null has no rows any more; with such entries alone, the others are as found.
        given = {value: name for value, name in given.items() if name is not None} or None
    found = {name: _values(material.column(rows, role)) for name, rows in material.parts}
    if isinstance(given, dict):
        named = {str(value): str(name) for value, name in given.items()}
        if not material.is_evaluation:
            named |= _unchanged(material, role, named, set().union(*found.values()))
        order = list(dict.fromkeys(named.values()))
        labels = Labels(order, {value: order.index(name) for value, name in named.items()})
    elif given is not None:
        labels = _in_order([str(name) for name in given])
    elif isinstance(material.recipe.data.columns.get(role), list):
        labels = _in_order([str(name) for name in material.recipe.data.columns[role]])
    else:
        labels = _declared(material, role) or _in_order(_sorted(set().union(*found.values())))
    for part, values in found.items():
        unknown = _sorted(values - labels.parse_number.keys())
        if unknown:
            hint = did_you_mean(unknown[0], list(labels.parse_number))
            rows = dict(material.parts)[part]
            cells = material.column(rows, role)
            places = [place for place, cell in enumerate(cells) if not _values([cell]).isdisjoint(unknown)]
            names = material.names(rows)
            places.sort(key=lambda place: (names[place].file or "", names[place].row))  # rows are shuffled
            listed = material.table(part, rows).listed(places)
            material.wrong(
                f"the {material.part_name(part)} rows have labels that are not listed: {', '.join(unknown[:5])}, in "
                f"{listed}.{hint}",
                "data",
                "labels",
            )
    if len(labels.names) < 2 or len(labels.names) > MOST_LABELS:
        where = material.recipe.column(role)
        said = "only one label" if len(labels.names) < 2 else f"{len(labels.names)} labels"
        material.wrong(f"the column {where!r} has {said}: {', '.join(labels.names[:5])}.", "data", "columns", role)
    return labels


def _unchanged(material: TaskSource, role: str, named: Mapping[str, str], there: set[str]) -> dict[str, str]:
    """Returns the labels that a mapping does not list, each with its name.

    A listed label that no row has is refused, as it would be a class without rows, unless the dataset declares it.
    """
    declared = _declared(material, role)
    known = {} if declared is None else {value: declared.names[at] for value, at in declared.parse_number.items()}
    others = _sorted(there - named.keys())
    absent = _sorted(named.keys() - there - known.keys())
    if absent:
        hint = did_you_mean(absent[0], others or there, quoted=True)
        material.wrong(f"no row has the label {absent[0]!r}, which data.labels renames.{hint}", "data", "labels")
    return {value: known.get(value, value) for value in others}


def _in_order(names: list[str]) -> Labels:
    return Labels(names, {name: number for number, name in enumerate(names)})


def _declared(material: TaskSource, role: str) -> Labels | None:
    """Returns the label names of a dataset of the package datasets, in which labels are numbers."""
    feature = getattr(material.train, "features", {}).get(material.recipe.column(role))
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else Labels(list(names), {str(number): number for number in range(len(names))})


def _values(column: Iterable[object]) -> set[str]:
    return {str(one) for cell in column for one in (cell if isinstance(cell, list) else [cell])}


def _sorted(values: Iterable[str]) -> list[str]:
    """Sorts numbers by size, then words."""
    return sorted(values, key=lambda value: (0, float(value), "") if _is_number(value) else (1, 0.0, value))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity")
