"""`trainwright export --prove`: compares the model that ships with the model that was trained.

Both are loaded from their own files, with their own tokenizer and template, and read the same rows. The comparison has
three parts:

- the files: tokens of each row, template, quantisation, settings of the adapter, and each entry of the configurations
  and of the tokenizer (`export_settings.py`);
- the rows: logits, likeliest next tokens, and the metrics of the run;
- the weights, layer by layer (`export_weights.py`): a change that is too small for these rows is found too.

The largest difference of logits is divided by the largest logit. If all logits are close to one number (a price of 1000
+- 5), it is divided by their spread. The limit depends on the type of the weights. In float32 it is 1e-4, as a merged
layer adds in another order. In a type that rounds by u (2^-8 in bf16, 2^-11 in fp16) the errors of n blocks add up like
the steps of a random walk, to c x u x sqrt(n). In random decoders of 1 to 32 blocks c was between 0.6 and 6.5
(`benchmarks/export_rounding.py`); the limit has 8. Example: bf16, 28 blocks: 8 x 0.0039 x 5.3 = 0.17.

A metric may change by the same limit, times its value or 1, whichever is larger. Metrics of a single output may change
by twice that, because a squared error has two factors, and a correlation by more if the outputs are nearly constant. An
accuracy may change by two more rows.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from trainwright._types import IGNORE_INDEX, TRAINER_STATE_NAME, JSONObject, counted
from trainwright.capability_table import has_capability
from trainwright.checkpoint.weights import GENERATION_NAME, KEPT
from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.recipe.schema import TASKS, Recipe
from trainwright.cli.recipe.yaml_tree import Tree
from trainwright.cli.tasks.applied import guess_task, recipe_at, recipe_file
from trainwright.cli.tasks.chat import end_tokens
from trainwright.cli.tasks.export import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    DTYPES,
    TEMPLATE_NAME,
    has_adapter,
    load_adapted,
)
from trainwright.cli.tasks.export_settings import (
    compare_settings,
    compare_tensor_names,
    compare_tokenizer_files,
    read_model_settings,
)
from trainwright.cli.tasks.export_weights import (
    ROUNDINGS,
    ExportFault,
    WeightReport,
    compare_weights,
    round_adapter,
)
from trainwright.cli.tasks.opened import load_whole, open_trained
from trainwright.cli.tasks.source import TaskSource, load
from trainwright.cli.tasks.task_objects import TaskObjects
from trainwright.cli.tasks.task_trainer import make_arguments, make_evaluator
from trainwright.cli.tasks.trained_tokens import find_recorded
from trainwright.data.seeding import set_seed
from trainwright.errors import ArgumentError, CheckpointError, DataError, RecipeError
from trainwright.support.door import read_json
from trainwright.support.scratch import make_scratch_folder

Model: TypeAlias = Any  # of transformers or peft: each class has its own methods
Batch: TypeAlias = "dict[str, Any]"  # tensors, by name
NUM_ROWS = 32  # of the run's own data
MAX_BYTES = 1 << 30  # of logits that are kept for the comparison
LIMIT_FLOAT32 = 1e-4
TIMES_ROUNDING = 8
SMALL = 1 << 24  # bytes of a file of settings
MAX_STATE = 1 << 30  # bytes of the state of a run, with its history
LEAST_LOSS = 1e-3  # relative difference of a loss from the recorded one, which another machine may have computed
# Entries of an adapter's configuration that a recipe sets: name there -> name in the recipe.
ADAPTER_SETTINGS = {"r": "r", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
FULL_PRECISION = {"bf16": False, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False}
NOT_SHOWN = ("runtime", "_per_second")


@dataclass(frozen=True, kw_only=True)
class ExportProof:
    """How an exported model compares with the trained one.

    Attributes:
        holds: whether nothing differs by more than its limit.
        rows: number of rows that both models read.
        rows_from: where they are from.
        dtype: type of the exported weights.
        trained_dtype: type of the trained weights.
        largest_difference: of two logits.
        relative_difference: the same, relative to the largest logit of the trained model, or to their spread.
        relative_to: "largest" or "spread".
        limit: of the relative difference.
        worst_row: name of the row with the largest difference.
        equal_tokens: share of positions with the same likeliest token or class; None for a single output.
        outputs: "tokens", "classes" or "number".
        positions: number of positions of which the logits were compared.
        metrics: by "trained" and "exported", the metrics of the run.
        tensors: number of tensors of weights that were compared.
        kept: share of the adapter's change that is in the exported weights; None without an adapter.
        differences: what differs, the first module first.
        is_accepted: whether the export was written although it differs.
    """

    holds: bool
    rows: int
    rows_from: str
    dtype: str
    trained_dtype: str
    largest_difference: float
    relative_difference: float
    relative_to: str
    limit: float
    worst_row: str
    equal_tokens: float | None
    outputs: str
    positions: int
    metrics: Mapping[str, Mapping[str, float]]
    tensors: int
    kept: float | None
    differences: tuple[ExportFault, ...]
    is_accepted: bool = False

    @property
    def _trained_in(self) -> str:
        """Returns the note on the type of the weights if the base was quantized during training."""
        return f", trained in {self.trained_dtype}" if " and " in self.trained_dtype else ""

    def refusal(self, folder: Path) -> str:
        """Returns why a directory was not written, for a comparison that does not hold."""
        others = len(self.differences) - 1
        are = "is" if others == 1 else "are"
        more = f" There {are} {counted(others, 'further difference')}." if others else ""
        return (
            f"The exported model is not the trained one, so {folder} was not written. The first difference is in "
            f"{self.differences[0]}.{more} --accept-differences writes it all the same; its card says what differs."
        )

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return {**dataclasses.asdict(self), "differences": [one._asdict() for one in self.differences]}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields the lines for the console: topic and text."""
        yield "proof", f"{counted(self.rows, 'row')} of {self.rows_from}, weights in {self.dtype}{self._trained_in}"
        whole = "the largest one" if self.relative_to == "largest" else "their spread"
        apart = f"{self.largest_difference:.2g}, or {self.relative_difference:.2g} of {whole}"
        yield "logits", f"largest difference {apart} (limit {self.limit:.2g})"
        if self.equal_tokens is not None:
            kind = "next ones" if self.outputs == "tokens" else "ones"
            yield self.outputs, f"{_percent(self.equal_tokens)} of the likeliest {kind} are equal"
        for name, value in self.metrics["trained"].items():
            yield name, f"{value:.4g} trained, {self.metrics['exported'].get(name, math.nan):.4g} exported"
        for one in self.differences:
            yield "differs", str(one)

    def section(self) -> str:
        """Returns a section of a model card, in Markdown."""
        verdict = "It is the trained model" if self.holds else "It differs from the trained model, which was accepted"
        lines = [
            f"{verdict}: the exported files were loaded again and compared with the checkpoint.",
            "",
            f"- rows: {self.rows} of {self.rows_from}",
            f"- weights: {self.dtype}{self._trained_in}, {self.tensors} tensors compared",
            f"- largest difference of logits: {self.largest_difference:.3g}, {self.relative_difference:.3g} of "
            f"{'the largest logit' if self.relative_to == 'largest' else 'their spread'} (limit {self.limit:.2g})",
        ]
        if self.equal_tokens is not None:
            kind = "next tokens" if self.outputs == "tokens" else "classes"
            lines.append(f"- equal {kind}: {_percent(self.equal_tokens)}")
        for name, value in self.metrics["trained"].items():
            lines.append(f"- {name}: {value:.4g} trained, {self.metrics['exported'].get(name, math.nan):.4g} exported")
        lines += [f"- differs: {one}" for one in self.differences]
        return "\n".join(lines)


def _percent(share: float) -> str:
    """Returns a share in percent; 100 % stands for all."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.99):.4g} %"


def difference_limit(dtypes: Sequence[torch.dtype], num_blocks: int) -> float:
    """Returns the largest relative difference of logits that rounding explains, by the coarsest of some types."""
    rounding = max(ROUNDINGS.get(dtype, 0.0) for dtype in dtypes)
    return max(LIMIT_FLOAT32, TIMES_ROUNDING * rounding * math.sqrt(max(num_blocks, 1)))


@contextmanager
def prepared_proof(
    source: Path, *, run: Path, data: Path | None = None, weights: str = "trained", dtype: str | None = None
) -> Iterator[Callable[[Path], ExportProof]]:
    """Reads the rows of a comparison, and yields what compares the model in a directory with the trained one.

    Args:
        source: directory of the checkpoint, or of the model of a run.
        run: directory with the recipe of the run, or of one of its checkpoints.
        data: file with rows; None for the rows that the run held out, or else the first that it trained on.
        weights: "trained" or "average".
        dtype: fp32, bf16 or fp16, if the weights were to be rounded to it; None for the types of the trained ones.

    Raises:
        ArgumentError: the run has no recipe and its model is not one that writes text, or there are no rows.
        DataError: the rows of the run are not there any more.
        RecipeError: the rows do not fit the task.
        CheckpointError: the trained model cannot be loaded.
    """
    scratch = make_scratch_folder("proof")
    try:
        proof = _Proof(source, run=run, data=data, weights=weights, dtype=dtype, scratch=scratch)
        proof.read_rows()
        yield proof.make
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Proof:
    """A comparison under way."""

    def __init__(
        self, source: Path, *, run: Path, data: Path | None, weights: str, dtype: str | None, scratch: Path
    ) -> None:
        self._source = source
        self._folder = scratch
        self._run = run
        self._weights = weights
        self._asked = None if dtype is None else DTYPES[dtype]
        self._unexpected: set[str] = set()
        self._scratch = scratch
        self._found: list[ExportFault] = []
        self._bits: str | None = None
        self._recipe_of_run: Recipe | None = None
        self._is_whole_hold_out = False
        # Set by read_rows().
        self._rows: tuple[Any, TaskSource, str]
        file = recipe_file(run)
        self._task = None if file is not None else guess_task(source)
        self._file = file
        self._data = data
        if file is None and (self._task is None or data is None):
            raise ArgumentError(
                f"{run} has no recipe.yaml, so its rows are unknown. Name a file: --prove data.jsonl (for models that "
                "write text)."
            )
        task = None if file is None else read_tree(file).value.get("task")
        if task in TASKS and TASKS[task].is_paired:
            raise ArgumentError(
                f"--prove compares the outputs for single texts, and {run} was trained on pairs (task: {task}). Export "
                "it without --prove."
            )

    def read_rows(self) -> None:
        """Reads the rows, before the export is written: it may take long, and they may be gone."""
        try:
            self._recipe_of_run = None if self._file is None else self._read_recipe()
            self._rows = self._choose_rows(self._recipe_of_run)
        except RecipeError as error:
            if self._data is not None:
                raise
            said = (error.entries[0][1] if error.entries else str(error)).strip().rstrip(".")
            raise DataError(
                f"The rows of the run cannot be read: {said}. Name a file of such rows to compare on: --prove FILE."
            ) from error

    def make(self, folder: Path) -> ExportProof:
        """Compares the model in a directory with the trained one."""
        self._folder = folder
        recipe = self._recipe_of_run
        self._bits = None if recipe is None else recipe.model.quantization
        rows, source, rows_from = self._rows
        trained = self._open_trained()
        self._check_settings(recipe)
        exported = self._open_exported(type(_base(trained)))
        if exported is None:
            raise _unusable(self._found[0], self._folder)
        words = self._describe(trained, self._source)
        read_from = self._folder if (self._folder / CONFIG_NAME).is_file() else self._describe(exported, self._folder)
        # Before the models are evaluated, which sets entries of them.
        settings = [read_model_settings(_base(one)) for one in (trained, exported)]
        first = self._evaluate(words, trained, rows, source)
        batches = list(_batches(first))
        names = [str(name) for name in first.parts.train.origin.names]
        expected = _Reading.take(trained, batches, first.trainer)
        trained.cpu()
        second = self._evaluate_exported(read_from, exported, rows, source)
        if second is not None:
            self._compare_tokens(first, second, names)
        got = _Reading.take(exported, batches, first.trainer if second is None else second.trainer)
        exported.cpu()
        dtypes = [_dtype(trained), _dtype(exported)]
        is_rounded = self._asked is not None and has_adapter(self._folder)
        rounded = [] if self._asked is None or not is_rounded else [self._asked]
        limit = difference_limit([*dtypes, *rounded], int(getattr(_base(trained).config, "num_hidden_layers", 1) or 1))
        scale, is_spread = _scale(expected.values)
        largest, worst = _largest_difference(expected, got)
        relative = largest / scale
        outputs = _find_output_kind(trained, expected)
        # Before adapters are merged for the comparison of the weights.
        named = None if relative <= limit else _first_module(trained, exported, batches, limit)
        if rounded:
            # The base stays as it is, and the adapter alone is in another type.
            round_adapter(trained, rounded[0])
        weights = self._compare_weights(trained, exported)
        self._found += weights.differences
        if named is not None and not weights.differences:
            self._found.append(named)
        metrics = {"trained": first.metrics, "exported": {} if second is None else second.metrics}
        if second is not None:
            spread = (scale, float(expected.values.std())) if outputs == "number" else None
            self._found += _moved_metrics(first.metrics, second.metrics, limit=limit, rows=len(rows), spread=spread)
        self._found += self._check_base(first.metrics.get("loss", math.nan), dtypes[0])
        self._compare_files(words, *settings, dtypes=dtypes, tokenizer=first.parts.processing_class)
        if self._bits is not None and self._found:
            said = f"the base was trained on in {self._bits}, and the export has it in full precision"
            self._found.insert(0, ExportFault(CONFIG_NAME, said))
        return ExportProof(
            holds=not self._found,
            rows=len(rows),
            rows_from=rows_from,
            dtype=_name(rounded[0] if rounded else dtypes[1]),
            trained_dtype=_name(dtypes[0]) if self._bits is None else f"{self._bits} and {_name(dtypes[0])}",
            largest_difference=largest,
            relative_difference=relative,
            relative_to="spread" if is_spread else "largest",
            limit=limit,
            worst_row=names[worst] if worst < len(names) else "",
            equal_tokens=None if outputs == "number" else _equal_share(expected, got),
            outputs=outputs,
            positions=expected.values.shape[0],
            metrics=metrics,
            tensors=weights.number,
            kept=weights.kept,
            differences=tuple(self._found),
        )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _read_recipe(self) -> Recipe:
        assert self._file is not None
        if self._data is None:
            return checked(read_tree(self._file), self._file.absolute().parent)
        # Without the files that the run trained on, which may be gone.
        return self._recipe(self._source, self._data)[0]

    def _choose_rows(self, recipe: Recipe | None) -> tuple[Any, TaskSource, str]:
        """Returns the rows, what was read with them, and where they are from."""
        if self._data is not None or recipe is None:
            assert self._data is not None
            pointed, tree = self._recipe(self._source, self._data)
            material = load(pointed, tree, is_evaluation=True)
            return material.train, material, self._data.name
        assert self._file is not None
        tree = read_tree(self._file)
        material = load(checked(tree, self._file.absolute().parent), tree)
        held = material.eval
        rows = held if len(held) else material.train
        rows_from = "the hold-out" if len(held) else "the training data"
        self._is_whole_hold_out = 0 < len(held) <= NUM_ROWS
        rows = rows.select(range(min(NUM_ROWS, len(rows)))) if hasattr(rows, "select") else rows[:NUM_ROWS]
        return rows, material, rows_from

    def _recipe(self, place: Path, data: Path | None = None) -> tuple[Recipe, Tree]:
        """Returns the recipe of the run, pointed at a model."""
        if data is None:
            # A file that is there; the rows are those that were chosen.
            data = self._scratch / "rows.jsonl"
            data.write_text("{}\n", encoding="utf-8")
        return recipe_at(place, data, run=self._run, task=self._task, scratch=self._scratch)

    # -- models --------------------------------------------------------------------------------------------------------

    def _open_trained(self) -> Model:
        """Loads the model as it was trained: whole, or its adapter on its base."""
        return open_trained(self._source, scratch=self._scratch, weights=self._weights, bits=self._bits)

    def _open_exported(self, kind: type) -> Model | None:
        """Loads the model as a stranger would, from its own directory; None if it cannot be loaded."""
        config = self._folder / CONFIG_NAME
        settings = read_json(config, max_bytes=SMALL) if config.is_file() else {}
        if settings.get("quantization_config"):
            self._found.append(
                ExportFault(
                    CONFIG_NAME,
                    "has quantization_config: the export has weights of few bits, and a merge into them rounds the "
                    "adapter away. Merge into the base model in full precision",
                )
            )
            return None
        try:
            if has_adapter(self._folder):
                return load_adapted(self._folder)
            model, missing, self._unexpected = load_whole(self._folder)
        except (OSError, ValueError, RuntimeError, AttributeError, CheckpointError) as error:
            self._found.append(ExportFault(CONFIG_NAME, f"the model cannot be loaded: {error}"))
            return None
        made: type = type(model)
        if made is not kind:
            said = f"architectures names {made.__name__}, and {kind.__name__} was trained"
            self._found.insert(0, ExportFault(CONFIG_NAME, said))
            return None
        for name in sorted(missing):
            said = "is not in the files of the export, so that it is drawn at random"
            self._found.append(ExportFault(name.rpartition(".")[0], said))
        return model.eval()

    def _check_settings(self, recipe: Recipe | None) -> None:
        """Compares the adapter's settings with those of the recipe; peft takes the scale of an adapter from there."""
        if recipe is None or recipe.lora is None or not has_adapter(self._source):
            return
        places = {self._source: "", self._folder: "the export's "}
        for place, whose in places.items():
            path = place / ADAPTER_CONFIG_NAME
            found = read_json(path, max_bytes=SMALL) if path.is_file() else {}
            for name, entry in ADAPTER_SETTINGS.items():
                trained = getattr(recipe.lora, entry)
                if name in found and found[name] != trained:
                    said = f"{name} is {found[name]}, and the run trained with {trained} (lora.{entry} in its recipe)"
                    self._found.append(ExportFault(f"{whose}{ADAPTER_CONFIG_NAME}", said))

    def _describe(self, model: Model, whole: Path) -> Path:
        """Returns a directory with the configuration and the tokenizer of a model, and without its weights."""
        place = self._scratch / ("trained" if whole == self._source else "exported")
        place.mkdir()
        is_of_run = whole == self._source and has_adapter(whole) and not (whole / CONFIG_NAME).is_file()
        for folder in (*([whole.absolute().parent] if is_of_run else []), whole):
            for path in sorted(folder.iterdir()):
                is_wanted = path.name == CONFIG_NAME if folder != whole else path.suffix in KEPT
                if is_wanted and path.is_file() and path.stat().st_size < SMALL << 2:
                    shutil.copyfile(path, place / path.name)
        if not (place / CONFIG_NAME).is_file():
            _base(model).config.save_pretrained(place)
        (place / ADAPTER_CONFIG_NAME).unlink(missing_ok=True)
        return place

    # -- comparisons ---------------------------------------------------------------------------------------------------

    def _evaluate(self, place: Path, model: Model, rows: Any, source: TaskSource) -> _Evaluated:
        recipe, tree = self._recipe(place)
        material = TaskSource(recipe, tree, rows, [], shape=source.shape, has_lists=source.has_lists, model=model)
        return _Evaluated.make(material)

    def _evaluate_exported(self, place: Path, model: Model, rows: Any, source: TaskSource) -> _Evaluated | None:
        try:
            return self._evaluate(place, model, rows, source)
        except RecipeError as error:
            said = f"the export cannot read the rows: {str(error).strip().splitlines()[-1].strip()}"
            self._found.append(ExportFault("tokenizer_config.json", said))
            return None

    def _compare_tokens(self, first: _Evaluated, second: _Evaluated, names: Sequence[str]) -> None:
        """Compares what both tokenizers and templates make of the rows."""
        one: Any = first.parts.processing_class
        other: Any = second.parts.processing_class
        file = "tokenizer.json"
        template = getattr(one, "chat_template", None)
        if template != getattr(other, "chat_template", None):
            self._found.append(ExportFault(TEMPLATE_NAME, "is not the template that the run trained with"))
            file = TEMPLATE_NAME
        for mark in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if getattr(one, mark, None) != getattr(other, mark, None):
                said = f"{mark} is {getattr(other, mark, None)}, and was {getattr(one, mark, None)}"
                self._found.append(ExportFault("tokenizer_config.json", said))
        if len(first.parts.train) != len(second.parts.train):
            said = f"makes {len(second.parts.train)} samples of the rows, and the trained one {len(first.parts.train)}"
            self._found.append(ExportFault(file, said))
            return
        pairs = zip(first.parts.train, second.parts.train, strict=True)
        apart = [place for place, (a, b) in enumerate(pairs) if a.get("input_ids") != b.get("input_ids")]
        if apart and file != TEMPLATE_NAME:
            where = names[apart[0]] if apart[0] < len(names) else "a row"
            more = f", and of {counted(len(apart) - 1, 'row')} more" if len(apart) > 1 else ""
            self._found.append(ExportFault(file, f"makes other tokens of {where}{more}"))

    def _compare_files(
        self,
        words: Path,
        trained: Mapping[str, JSONObject],
        exported: Mapping[str, JSONObject],
        *,
        dtypes: Sequence[torch.dtype],
        tokenizer: Any,
    ) -> None:
        """Compares the entries of the settings, and what the files of weights have."""
        is_adapter = has_adapter(self._folder)
        wants_file = find_recorded(self._source, GENERATION_NAME) is not None or (
            has_adapter(self._source) and not is_adapter
        )
        if GENERATION_NAME in trained and wants_file and not (self._folder / GENERATION_NAME).is_file():
            self._found.append(ExportFault(GENERATION_NAME, "is not in the export, and the trained model has it"))
        else:
            self._found += self._check_ends(exported.get(GENERATION_NAME, {}), tokenizer)
        self._found += compare_settings(trained, exported)
        self._found += compare_tokenizer_files(words, self._folder)
        self._found += compare_tensor_names(
            self._source, self._folder, self._unexpected, same_types=self._asked is None
        )
        wanted = dtypes[0] if self._asked is None or is_adapter else self._asked
        if dtypes[1] != wanted and self._bits is None:
            why = "" if self._asked is not None else ", and --dtype was not given"
            said = f"the weights are in {_name(dtypes[1])}, not in {_name(wanted)}{why}"
            self._found.append(ExportFault(CONFIG_NAME, said))

    def _check_base(self, loss: float, dtype: torch.dtype) -> Iterator[ExportFault]:
        """Yields a difference if an adapter on its base has another loss than the run recorded on the same rows."""
        recipe = self._recipe_of_run
        if recipe is None or not self._is_whole_hold_out or not has_adapter(self._source):
            return
        training = recipe.training
        # Words that are masked at random, other weights than the last ones, and losses that are not computed again.
        is_other = recipe.task == "masked-lm" or self._bits is not None or self._weights != "trained"
        if is_other or any(training.get(name) for name in ("load_best_model_at_end", "label_smoothing_factor")):
            return
        recorded = _recorded_loss(self._source)
        rounding = max([ROUNDINGS.get(dtype, 0.0)] + [2.0**-8] * bool(training.get("bf16") or training.get("fp16")))
        allowed = max(LEAST_LOSS, 2 * rounding) * max(abs(recorded or 0.0), 1.0)
        if recorded is not None and not abs(loss - recorded) <= allowed:
            name = read_json(self._source / ADAPTER_CONFIG_NAME, max_bytes=SMALL)["base_model_name_or_path"]
            yield ExportFault(
                "base model",
                f"with the adapter on {name}, the loss of the hold-out is {loss:.4g}, and the run recorded "
                f"{recorded:.4g}: the base (model.path) or the rows changed since the training. Put back what it "
                "trained on, or compare on other rows: --prove FILE",
            )

    def _check_ends(self, generation: JSONObject, tokenizer: Any) -> Iterator[ExportFault]:
        """Yields a difference if an answer of a chat model would not end where it was trained to."""
        recipe = None if self._file is None else read_tree(self._file).value
        if recipe is None or recipe.get("task") != "chat":
            return
        own = generation.get("eos_token_id")
        known = own if isinstance(own, list) else [own]
        wanted = end_tokens(tokenizer)
        if not set(wanted) <= set(known):
            yield ExportFault(GENERATION_NAME, f"eos_token_id is {own}, trained with {wanted}")

    def _compare_weights(self, trained: Model, exported: Model) -> WeightReport:
        average: Mapping[str, torch.Tensor] = {}
        if self._weights == "trained" and has_capability("averages"):
            from trainwright.capabilities.averages.saved import read_average

            try:
                average = read_average(self._source)
            except CheckpointError:
                # The run kept none.
                average = {}
        if self._bits is not None:
            trained = load_adapted(self._source)
        with warnings.catch_warnings():
            # of peft, about layers that are merged already
            warnings.simplefilter("ignore")
            return compare_weights(trained, exported, average=average, dtype=self._asked)


def _recorded_loss(source: Path) -> float | None:
    """Returns the loss of the last evaluation at the step of a checkpoint, or of the model of a run; None without."""
    own = source / TRAINER_STATE_NAME
    if not own.is_file():
        return None
    step = read_json(own, max_bytes=MAX_STATE).get("global_step")
    of_run = source.absolute().parent / TRAINER_STATE_NAME
    for path in (own, of_run):
        entries = read_json(path, max_bytes=MAX_STATE).get("log_history") or [] if path.is_file() else []
        for entry in reversed(entries):
            if entry.get("step") == step and isinstance(entry.get("eval_loss"), float):
                return float(entry["eval_loss"])
    return None


def _unusable(found: ExportFault, folder: Path) -> CheckpointError:
    return CheckpointError(f"The export cannot be used, so {folder} was not written: {found}.")


def _base(model: Model) -> Model:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _dtype(model: nn.Module) -> torch.dtype:
    """Returns the type of most weights of a model."""
    sizes: dict[torch.dtype, int] = {}
    for one in model.parameters():
        if one.is_floating_point():
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- rows through models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Evaluated:
    """A model, its samples and its metrics."""

    trainer: Any  # a Trainer
    parts: TaskObjects
    metrics: dict[str, float]

    @classmethod
    def make(cls, material: TaskSource) -> _Evaluated:
        """Encodes the rows with the tokenizer of a model, and evaluates the model on them."""
        recipe = material.recipe
        # Without autocast, which would round every layer's outputs: the limits are those of the weights' types.
        args = make_arguments(recipe, {**recipe.training, **FULL_PRECISION})
        parts, trainer = make_evaluator(material, args)
        # A masked model hides the same words in both evaluations.
        set_seed(args.seed)
        found = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items() if name != "epoch"}
        metrics = {name: float(value) for name, value in found.items() if not name.endswith(NOT_SHOWN)}
        return cls(trainer, parts, metrics)


def _batches(one: _Evaluated) -> Iterator[Batch]:
    set_seed(one.trainer.args.seed)
    for batch in one.trainer.get_eval_dataloader():
        yield {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@dataclass(frozen=True)
class _Reading:
    """What a model makes of the rows.

    Attributes:
        values: logits at some positions, evenly chosen: (positions, outputs), float32.
        rows: for each of these positions, the number of its row.
        best: for every position, the likeliest output.
    """

    values: torch.Tensor
    rows: torch.Tensor
    best: torch.Tensor

    @classmethod
    def take(cls, model: Model, batches: Sequence[Batch], trainer: Any) -> _Reading:
        values: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        best: list[torch.Tensor] = []
        start = 0
        model.to(trainer.args.device)
        for batch in batches:
            with torch.no_grad():
                logits = model(**trainer._prepare_inputs(dict(batch))).logits.float().cpu()
            mask = _positions(model, batch, logits)
            number = torch.arange(len(logits)).view(-1, *[1] * (mask.ndim - 1)).expand(mask.shape)[mask] + start
            chosen = logits[mask]
            best.append(chosen.argmax(dim=-1))
            most = max(1, MAX_BYTES // (4 * chosen.shape[-1] * len(batches)))
            kept = torch.linspace(0, len(chosen) - 1, min(most, len(chosen))).round().long()
            values.append(chosen[kept])
            rows.append(number[kept])
            start += len(logits)
        return cls(torch.cat(values), torch.cat(rows), torch.cat(best))


def _positions(model: Model, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Returns which positions have an output to compare: (batch) or (batch, tokens), without padding."""
    if logits.ndim == 2:
        return torch.ones(len(logits), dtype=torch.bool)
    mask: torch.Tensor | None = batch.get("attention_mask")
    labels: torch.Tensor | None = batch.get("labels")
    if getattr(_base(model).config, "is_encoder_decoder", False) and labels is not None:
        return (labels != IGNORE_INDEX)[:, : logits.shape[1]]
    if mask is not None and mask.shape == logits.shape[:2]:
        return mask.bool()
    return torch.ones(logits.shape[:2], dtype=torch.bool)


def _find_output_kind(model: Model, one: _Reading) -> str:
    """Returns what the outputs of a model are: "number" for a single one, "tokens" or "classes"."""
    if one.values.shape[-1] == 1:
        return "number"
    return "classes" if "Classification" in type(_base(model)).__name__ else "tokens"


def _scale(values: torch.Tensor) -> tuple[float, bool]:
    """Returns what a difference of logits is relative to, and whether that is their spread.

    It is the largest logit, unless the logits are a constant and less than that around it. Numbers of one type are as
    coarse as their size, so a spread below 1 % of it is not told from none.
    """
    largest = max(float(values.abs().max()), 1e-30)
    spread = float((values - values.mean()).abs().max())
    if values.numel() == 1 or not spread < float(values.mean().abs()):
        return largest, False
    return max(spread, 0.01 * largest), True


def _moved_metrics(
    trained: Mapping[str, float],
    exported: Mapping[str, float],
    *,
    limit: float,
    rows: int,
    spread: tuple[float, float] | None,
) -> Iterator[ExportFault]:
    """Yields a difference for each metric that moved by more than rounding explains.

    Args:
        trained: metrics of the trained model.
        exported: metrics of the exported one.
        limit: of the relative difference of logits.
        rows: number of rows.
        spread: of a model with a single output, what a difference of outputs is relative to, and their standard
            deviation, on which correlations depend; None for others.
    """
    scale, deviation = spread or (1.0, 1.0)
    for name, before in trained.items():
        after = exported.get(name, math.nan)
        is_share = name != "loss" and spread is None
        # In the unit of the numbers, or in its square.
        units = {"loss": scale**2, "rmse": scale, "mae": scale}
        least = units.get(name, max(1.0, scale / max(deviation, 1e-30)))
        allowed = (1 if spread is None else 2) * limit * max(abs(before), least)
        if is_share:
            # Rounding may change the class of two rows.
            allowed += 2 / rows
        if not abs(after - before) <= allowed and not (math.isnan(before) and math.isnan(after)):
            yield ExportFault(
                f"metric {name}", f"is {after:.4g}, and {before:.4g} when trained (may move by {allowed:.2g})"
            )


def _largest_difference(one: _Reading, other: _Reading) -> tuple[float, int]:
    """Returns the largest difference of two logits, and the row that has it."""
    if one.values.shape != other.values.shape:
        return math.inf, 0
    apart = (one.values - other.values).abs().amax(dim=-1)
    worst = int(apart.nan_to_num(nan=math.inf).argmax())
    largest = float(apart[worst])
    return largest, int(one.rows[worst])


def _equal_share(one: _Reading, other: _Reading) -> float:
    return float((one.best == other.best).float().mean()) if one.best.shape == other.best.shape else 0.0


def _first_module(trained: Model, exported: Model, batches: Sequence[Batch], limit: float) -> ExportFault:
    """Returns the first module, in the order in which they end, whose outputs differ."""
    batch = {
        name: value for name, value in batches[0].items() if name != "labels" or "decoder_input_ids" not in batches[0]
    }
    one = _outputs(trained, batch)
    other = _outputs(exported, batch)
    for name, value in other.items():
        wanted = one.get(name)
        if wanted is None:
            continue
        if wanted.shape != value.shape:
            return ExportFault(name, f"its outputs have the shape {tuple(value.shape)}, not {tuple(wanted.shape)}")
        away = float((wanted - value).abs().max()) / max(float(wanted.abs().max()), 1e-30)
        if not away <= limit:
            said = (
                f"its outputs differ by {away:.2g}, though no weight is away by more than rounding: see {CONFIG_NAME}"
            )
            return ExportFault(name or "the model", said)
    cure = "" if _dtype(exported) == torch.float32 else ". This type is too coarse for them: export with --dtype fp32"
    return ExportFault("logits", f"differ, and no module's outputs do by more than the limit{cure}")


def _outputs(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the output of each module of a base model, by name, in the order in which they end."""
    found: dict[str, torch.Tensor] = {}
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                found.pop(name, None)
                found[name] = first.detach().float()

        return hook

    for name, module in _base(model).named_modules():
        plain = name.removesuffix(".base_layer")
        if not {"lora_A", "lora_B", "lora_dropout", "original_module", "modules_to_save"} & set(name.split(".")):
            hooks.append(module.register_forward_hook(keep(plain)))
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for one in hooks:
            one.remove()
    return found
