"""The vocabulary that every room shares: file names, small protocols, questions about a value's shape."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard
from urllib.parse import quote, quote_plus

# A batch maps the names of a model's inputs to tensors (or nested containers of them); its values are the user's.
Batch: TypeAlias = dict[str, Any]
Piece: TypeAlias = tuple[int, int, int]  # id of a sample, and the tokens of it from a start to before a stop
Row: TypeAlias = "int | list[Piece]"  # the id of a row's sample, or the pieces of samples that are packed into it
SampleIds: TypeAlias = "Sequence[Row]"  # of a batch, in the order of its rows; empty where they are not known
# A sample as the user's dataset gives it.
Item: TypeAlias = Any
StateDict: TypeAlias = dict[str, Any]  # tensors, numbers and nests of them, as `state_dict()` returns them
# Torch's, or an object with its methods: DeepSpeed's, an optimizer package's, a user's own. They share no class.
Optimizer: TypeAlias = Any
Scheduler: TypeAlias = Any
# The user's module, or a backend's wrapper around it; transformers' models have methods that no other module has.
Model: TypeAlias = Any
# The user's own types: map-style, a stream, or a `datasets.Dataset`; and whatever gives batches of one.
DatasetLike: TypeAlias = Any
DataLoaderLike: TypeAlias = Any
Trial: TypeAlias = Any  # of the backend of a search
# Tensors or arrays, alone or in lists, tuples and mappings of any depth: the model decides the nesting.
Nested: TypeAlias = Any
# An object of JSON: its values are of every type that JSON has, and a reader checks them.
JSONObject: TypeAlias = dict[str, Any]

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINING_ARGS_NAME = "training_args.bin"
TRAINING_ARGS_JSON_NAME = "training_args.json"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
FSDP_MODEL_NAME = "pytorch_model_fsdp"
SCALER_NAME = "scaler.pt"
SCHEDULER_NAME = "scheduler.pt"
RNG_STATE_NAME = "rng_state.pth"
DATA_POSITION_NAME = "data_position.pth"
GUARD_STATE_NAME = "guard_state.json"
ITEMS_NAME = "checkpoint_items.pt"
CURRICULUM_NAME = "curriculum.pt"
RECORDED_METRICS_NAME = "recorded_metrics.json"
EXTENSIONS_NAME = "extension_states.pt"
LEDGER_NAME = "ledger.parquet"
QUARANTINE_NAME = "quarantine.jsonl"
RECIPE_NAME = "recipe.yaml"
AVERAGES_NAME = "weight_averages.pt"
MANIFEST_NAME = "manifest.json"

IGNORE_INDEX = -100  # a label that no loss counts


class TailBatch(Batch):
    """A batch of the tail of an epoch, which the processes share unevenly; every other batch is a plain one.

    Attributes:
        num_samples: samples in it that count; 0 where it only stands in, so that all processes take the same steps.
        weight: by which its mean loss is multiplied, so that the mean over processes is the mean over samples.
    """

    def __init__(self, batch: Mapping[str, Any], *, num_samples: int, weight: float) -> None:
        super().__init__(batch)
        self.num_samples = num_samples
        self.weight = weight

    def __reduce__(self) -> Any:
        return partial(TailBatch, num_samples=self.num_samples, weight=self.weight), (dict(self),)


def tail_batch(batch: Any, *, num_samples: int, weight: float) -> Any:  # a collator's, of any type
    """Returns a batch of the tail with what counts of it; one that is not a mapping counts as a whole batch."""
    return TailBatch(batch, num_samples=num_samples, weight=weight) if isinstance(batch, Mapping) else batch


@dataclass(slots=True)
class Prepared:
    """Model, optimizer and scheduler as the loop uses them, as an engine returns them."""

    model: Any  # the user's module, or the backend's wrapper around it
    optimizer: Optimizer
    scheduler: Scheduler


class UnmatchedKeys(Protocol):
    """Names that did not match when weights were loaded, as torch's `load_state_dict` returns them."""

    @property
    def missing_keys(self) -> list[str]: ...
    @property
    def unexpected_keys(self) -> list[str]: ...


class UnmatchedNames(NamedTuple):
    """`UnmatchedKeys` that one of our own loaders returns."""

    missing_keys: list[str]  # the weights lack them
    unexpected_keys: list[str]  # the model lacks them


def write_text(path: str | Path, text: str) -> None:
    """Writes a small file as a whole or not at all: a reader never finds half of it."""
    write_pieces(path, [text.encode()])


def write_pieces(path: str | Path, pieces: Iterable[bytes]) -> None:
    """Writes a file as `write_text` does, of a text in pieces."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.writelines(pieces)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Replaces a file at once, by writing to the path that it yields, in the same folder: the old file or the new one.

    The file may not exist yet. After an error in the context what was written is removed.
    """
    path = Path(path)
    # A name that nobody can guess: a link that lies there already would be written through.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def json_value(value: Any, depth: int = 64, *, text: Callable[[str], str] = lambda text: text) -> Any:
    """Converts a value to what strict JSON has: nested dicts and lists of strings, numbers, bools and None.

    Numbers of libraries become Python's; numbers that are not finite, and all other objects, become text. What lies
    deeper than `depth` levels becomes the name of its type. `text` is applied to all texts but the names of a dict.
    """
    if value is None or type(value) in (int, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)) and depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {
            str(name): inner if inner is None or type(inner) in (int, bool) else json_value(inner, depth - 1, text=text)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(inner, depth - 1, text=text) for inner in value]
    value = python_number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (int, float)) else text(str(value))


def python_number(value: Any) -> Any:
    """Returns the Python number in a scalar, or an array or tensor of one element; any other value as it is."""
    if not hasattr(value, "item"):
        return value
    numel = getattr(value, "numel", None)  # of a tensor, whose `size` is a method
    return value.item() if (numel() if callable(numel) else getattr(value, "size", 1)) == 1 else value


def plain_numbers(value: Any) -> Any:  # of the type that came in, but for the numbers
    """Converts numpy scalars, and arrays and tensors of one element, at any depth into Python numbers."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_numbers(item) for item in value)
    return python_number(value)


def metric_number(value: object) -> float:
    """Returns the number that a metric is; NaN for None, text, several numbers and any other object."""
    value = python_number(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value)
    if isinstance(value, (int, float)):
        return value
    return float(value) if isinstance(value, Number) and not isinstance(value, complex) else math.nan  # type: ignore[arg-type]


def recordable(values: Mapping[Any, object], dropped: dict[str, str]) -> dict[str, Any]:  # JSON
    """Returns the values that JSON can hold, with plain numbers; `dropped` gets the name of each other one."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            dropped[repr(name)] = f"named by a {type(name).__name__} instead of text"
        elif value is None or type(value) in (float, int, str, bool):
            kept[name] = value
        else:
            try:
                kept[name] = plain_numbers(value)
                json.dumps(kept[name], sort_keys=True)
            except (TypeError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
                kept.pop(name, None)
                shape = getattr(value, "shape", None)
                dropped[name] = f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
    return kept


def read_json(path: str | Path, *, max_bytes: int) -> Any:
    """The value in a JSON file of a stranger; ValueError where it is too large, nested too deeply, or no JSON."""
    return parse_json(read_bytes(path, max_bytes=max_bytes))


def parse_json(content: bytes) -> Any:
    """Returns the value in the content of a JSON file; ValueError where it is nested too deeply, or no JSON."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_bytes(path: str | Path, *, max_bytes: int) -> bytes:
    """Returns the content of a stranger's file; ValueError where it is too large, or is a pipe, device or directory.

    A pipe without a writer does not block it, and of an endless device nothing is read.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it has {status.st_size} bytes, and at most {max_bytes} are read")
    with path.open("rb") as file:
        return file.read(status.st_size)  # not `max_bytes`: room for that many would be taken


# Control characters, and those that reverse the direction of text: as their escapes.
_ESCAPES = {
    code: repr(chr(code))[1:-1]
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_LINE_ESCAPES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
SHORTEST_TOKEN = 15  # "bearer " and eight characters; a shorter text only hides one after a sign
_SECRETS = tuple(
    (re.compile(pattern, re.IGNORECASE), r"\1***")
    for pattern in (
        r"(://)[^\s/@\"'\\]{1,200}(?=@)",  # user and password of a URL
        r"([?&][\w.-]{0,40}(?:token|key|secret|passw|signature|\bsig|credential|auth)[\w.-]{0,40}=)[^\s&\"'<>\\#]+",
        r"(\bauthorization[\"'\\]*\s*[:=]\s*[\"'\\]*(?:(?:bearer|basic|token)\s+)?)[^\s\"',;}\\]+",
        r"(\bbearer\s+)[\w.~+/=-]{8,}",
        r"((?:api[_-]?key|access[_-]?key|secret[_-]?key|(?:hf|hub|auth|access|api)[_-]token|password)"
        r"[\"'\\]*\s*[:=]\s*[\"'\\]*)(?!None\b|null\b)[^\s\"',;&}\])\\]+",
        r"(\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA))[\w-]{16,}",
    )
)


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text for a terminal: control characters as escapes, line breaks and tabs too unless `lines`."""
    return text if text.isprintable() else text.translate(_LINE_ESCAPES if lines else _ESCAPES)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: object) -> bool:
    """Returns True for text such as `s3://bucket/run`, False for a path."""
    return isinstance(path, str) and _URL.match(path) is not None


_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)  # in the name of an environment variable
SHORTEST_SECRET = 6
LONG_SECRET = 8  # of this length on, a secret is found inside a longer word too
_ORDINARY = {"enable", "enabled", "disable", "disabled", "default", "offline", "online", "always", "warning"}
_hidden: set[str] = set()  # secrets that are no environment variables


def hide(secret: object) -> None:
    """Masks a text, such as a Hub token, in all that is logged or recorded from now on."""
    if isinstance(secret, str):
        _hidden.add(secret)


def _is_secret(value: str) -> bool:
    """Returns whether a value can be masked by itself: short words, small numbers and paths are ordinary text."""
    if len(value) < SHORTEST_SECRET or value.lower() in _ORDINARY:
        return False
    is_number = value.replace(".", "", 1).isdigit() and len(value) < LONG_SECRET
    return not is_number and not (value.startswith(("/", "~", ".")) and os.path.exists(os.path.expanduser(value)))


def _secret_values() -> list[str]:
    """Returns the secrets of this process, each also as it is in a URL, and its long lines; the longest first."""
    values = {value.strip() for name, value in os.environ.items() if _SECRET_NAME.search(name)} | _hidden
    found = set()
    for value in filter(_is_secret, values):
        lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= SHORTEST_TOKEN]
        for one in (value, *lines):
            found |= {one, quote(one, safe=""), quote_plus(one)}
    return sorted(found, key=len, reverse=True)


def without_tokens(text: str) -> str:
    """Returns text with *** in the place of secrets and of what looks like a key.

    Secrets are the values given to `hide`, and those of environment variables with KEY, TOKEN, SECRET or PASSWORD in
    their names. A key is known by its form: in a URL, a header, an assignment.
    """
    for secret in _secret_values():
        if secret in text:
            exact = re.escape(secret) if len(secret) >= LONG_SECRET else rf"(?<!\w){re.escape(secret)}(?!\w)"
            text = re.sub(exact, "***", text)
    if len(text) < SHORTEST_TOKEN and ":" not in text and "=" not in text:  # nearly all values of arguments
        return text
    for pattern, mask in _SECRETS:
        text = pattern.sub(mask, text)
    return text


def counted(number: float, thing: str) -> str:
    """Returns a number with the singular or the plural of a thing: "1 step", "2 batches", "3 entries"."""
    if number == 1:
        return f"1 {thing}"
    if thing.endswith("ry"):
        thing = f"{thing[:-1]}ie"
    return f"{number:.12g} {thing}{'es' if thing.endswith(('s', 'tch')) else 's'}"


def is_count(value: object) -> bool:
    """Returns whether a value in a file is a number that a run may have counted to."""
    return isinstance(value, int) and 0 <= value <= sys.maxsize


def has_length(thing: object) -> TypeGuard[Any]:
    """Returns True if `len(thing)` works; datasets that raise from `__len__` count as having none.

    Args:
        thing: any object.

    Returns:
        True if it has a length.
    """
    try:
        return len(thing) is not None  # type: ignore[arg-type]
    except (TypeError, AttributeError, NotImplementedError):
        return False


def optional_class(module: str, name: str) -> type | None:
    """The class `name` of an optional package, if that package is loaded already; never imports it.

    An object can only be an instance of a class whose module is loaded, so this is all that an `isinstance` needs.
    """
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(thing: object, module: str, name: str) -> bool:
    """`isinstance` against a class of a package that may not be loaded."""
    cls = optional_class(module, name)
    return cls is not None and isinstance(thing, cls)


def output_loss(outputs: Any) -> Any:
    """The loss of a model's output: the entry `loss` of a mapping, else the first element; None where there is none."""
    if type(outputs) is dict or isinstance(outputs, Mapping):
        return outputs.get("loss")
    return outputs[0] if isinstance(outputs, (tuple, list)) and len(outputs) > 0 else None


def output_logits(outputs: Any) -> Any:
    """The scores of a model's output: the entry `logits` of a mapping, else the first element of a tuple."""
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
