"""Types and helpers that every subpackage shares: file names, small protocols, checks of a value's shape."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard
from urllib.parse import quote, quote_plus

# A batch maps the names of a model's inputs to tensors (or nested containers of them); its values are the user's.
Batch: TypeAlias = dict[str, Any]
Piece: TypeAlias = tuple[int, int, int]  # (sample id, first token, end token), end exclusive
Row: TypeAlias = "int | list[Piece]"  # the id of a row's sample, or the pieces packed into the row
SampleIds: TypeAlias = "Sequence[Row]"  # ids of the rows of a batch, in order; empty if they are unknown
# A sample as the user's dataset gives it.
Item: TypeAlias = Any
StateDict: TypeAlias = dict[str, Any]  # tensors, numbers and nests of them, as `state_dict()` returns them
# Torch's, or an object with its methods: DeepSpeed's, an optimizer package's, a user's own. They share no class.
Optimizer: TypeAlias = Any
Scheduler: TypeAlias = Any
# The user's module, or a backend's wrapper around it; transformers' models have methods that no other module has.
Model: TypeAlias = Any
# The user's own types: a map-style dataset, a stream or a `datasets.Dataset`, or anything that yields its batches.
DatasetLike: TypeAlias = Any
DataLoaderLike: TypeAlias = Any
Trial: TypeAlias = Any  # class of the search backend
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
EXTENSIONS_NAME = "extension_states.pt"
VALUES_FILE = re.compile(r"^values-rank(\d+)\.jsonl$")  # recorded values of a process
RECIPE_NAME = "recipe.yaml"
MANIFEST_NAME = "manifest.json"

IGNORE_INDEX = -100  # label value that the loss ignores


class TailBatch(Batch):
    """A batch from the end of an epoch, with its samples split unevenly over the processes.

    All other batches are plain.

    Attributes:
        num_samples: number of real samples; 0 for a filler batch, which lets every process take the same steps.
        weight: factor for its mean loss, so that the mean over processes equals the mean over samples.
    """

    def __init__(self, batch: Mapping[str, Any], *, num_samples: int, weight: float) -> None:
        super().__init__(batch)
        self.num_samples = num_samples
        self.weight = weight

    def __reduce__(self) -> Any:
        return partial(TailBatch, num_samples=self.num_samples, weight=self.weight), (dict(self),)


def tail_batch(batch: Any, *, num_samples: int, weight: float) -> Any:  # the collator's batch, of any type
    """Returns the batch as a TailBatch; a batch that is not a mapping counts as a whole batch."""
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
    """`UnmatchedKeys` as returned by our own loaders."""

    missing_keys: list[str]  # the weights lack them
    unexpected_keys: list[str]  # the model lacks them


def write_text(path: str | Path, text: str) -> None:
    """Writes a small file atomically: a reader never sees part of it."""
    write_pieces(path, [text.encode()])


def write_pieces(path: str | Path, pieces: Iterable[bytes]) -> None:
    """Like `write_text`, for content that comes in pieces."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.writelines(pieces)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Replaces a file atomically: yields a temporary path in the same folder, which then takes the place of the file.

    The file need not exist yet. If the context raises an error, the temporary file is removed.
    """
    path = Path(path)
    # The name is random: writing to a predictable one could follow a symlink planted there.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def json_value(value: Any, depth: int = 64, *, text: Callable[[str], str] = lambda text: text) -> Any:
    """Converts a value to strict JSON: nested dicts and lists of strings, numbers, bools and None.

    Numbers from other libraries become Python numbers; non-finite numbers and all other objects become text. Below
    `depth` levels, a value becomes the name of its type. `text` is applied to every string except the keys of dicts.
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
    """Returns a scalar, or an array or tensor with one element, as a Python number; any other value unchanged."""
    if not hasattr(value, "item"):
        return value
    numel = getattr(value, "numel", None)  # tensors: their `size` is a method
    return value.item() if (numel() if callable(numel) else getattr(value, "size", 1)) == 1 else value


def plain_numbers(value: Any) -> Any:  # same type as the input, except for numbers
    """Converts numpy scalars and one-element arrays and tensors, at any depth, to Python numbers."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_numbers(item) for item in value)
    return python_number(value)


def metric_number(value: object) -> float:
    """Returns a metric as a float; NaN for None, text, several numbers or any other object."""
    value = python_number(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value)
    if isinstance(value, (int, float)):
        return value
    return float(value) if isinstance(value, Number) and not isinstance(value, complex) else math.nan  # type: ignore[arg-type]


def recordable(values: Mapping[Any, object], dropped: dict[str, str]) -> dict[str, Any]:  # JSON
    """Returns the values that JSON can hold, as plain numbers; the names of all others are added to `dropped`."""
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


# Control characters, and characters that reverse the direction of text, become escapes.
_ESCAPES = {
    code: repr(chr(code))[1:-1]
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *(0x2028, 0x2029),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),  # halves of characters, which no file can hold
    )
}
_LINE_ESCAPES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
SHORTEST_TOKEN = 15  # "bearer " and eight characters; shorter text can only hold a secret after a separator
_SECRETS = tuple(
    (re.compile(pattern, re.IGNORECASE), r"\1***")
    for pattern in (
        r"(://)[^\s/@\"'\\]{1,200}(?=@)",  # user and password of a URL
        r"([?&][\w.-]{0,40}(?:token|key|secret|passw|signature|\bsig|credential|auth)[\w.-]{0,40}=)[^\s&\"'<>\\#]+",
        r"(\bauthorization[\"'\\]*\s*[:=]\s*[\"'\\]*(?:(?:bearer|basic|token)\s+)?)[^\s\"',;}\\]+",
        r"(\bbearer\s+)[\w.~+/=-]{8,}",
        r"((?:api[_-]?key|access[_-]?key|account[_-]?key|secret[_-]?key|passw(?:or)?d|passphrase|credential|(?:hf|hub|auth|access|api|sas)[_-]token)"
        r"[\"'\\]*\s*[:=]\s*[\"'\\]*)(?!None\b|null\b)[^\s\"',;&}\])\\]+",
        r"(\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA))[\w-]{16,}",
    )
)


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text that is safe for a terminal.

    Control characters are escaped, and line breaks and tabs too unless `lines`.
    """
    return text if text.isprintable() else text.translate(_LINE_ESCAPES if lines else _ESCAPES)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: object) -> bool:
    """Returns True for text such as `s3://bucket/run`, False for a path."""
    return isinstance(path, str) and _URL.match(path) is not None


# In the name of an environment variable. AUTH is not AUTHOR, and PWD alone is the working directory.
_SECRET_NAME = re.compile(
    "KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|CONNECTION_?STRING|CONN_?STR|(?<=_)PWD|(?<=_)DSN"
    "|(?<![A-Z])SAS(?![A-Z])|AUTH(?!OR(?!IZ))",
    re.IGNORECASE,
)
_PART = re.compile(r"[\"']?(\w{1,60})[\"']?\s*[=:]\s*[\"']?([^;,\"'\s]+)")
SHORTEST_SECRET = 6
LONG_SECRET = 8  # from this length on, a secret is also found inside a longer word
_ORDINARY = {
    "enable",
    "enabled",
    "disable",
    "disabled",
    "default",
    "offline",
    "online",
    "always",
    "warning",
    "password",
    "kerberos",
    "bearer",
    "oauth2",
}
_hidden: set[str] = set()  # secrets that are not environment variables


def hide(secret: object) -> None:
    """Masks a text, such as a Hub token, in everything that is logged or recorded from now on."""
    if isinstance(secret, str):
        _hidden.add(secret)


def _is_secret(value: str) -> bool:
    """Returns whether a value can be masked by itself: short words, small numbers and paths are too common."""
    if len(value) < SHORTEST_SECRET or value.lower() in _ORDINARY:
        return False
    is_number = value.replace(".", "", 1).isdigit() and len(value) < LONG_SECRET
    return not is_number and not (value.startswith(("/", "~", ".")) and os.path.exists(os.path.expanduser(value)))


def is_secret_name(name: str) -> bool:
    """Returns whether the name of an environment variable means that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def _secret_values() -> list[str]:
    """Returns the secrets of this process, also encoded, quoted, and in parts, longest first."""
    values = {value.strip() for name, value in os.environ.items() if is_secret_name(name)} | _hidden
    found = set[str]()
    for value in filter(_is_secret, values):
        lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= SHORTEST_TOKEN]
        for one in (value, *lines, *_split_secret(value)):
            found |= _spellings(one)
    return sorted(found, key=len, reverse=True)


def _split_secret(value: str) -> Iterator[str]:
    """Yields the secrets in a value such as `AccountName=me;AccountKey=abc`, or in an object of JSON."""
    for name, one in _PART.findall(value):
        if is_secret_name(name) and _is_secret(one):
            yield one


@lru_cache(maxsize=1024)
def _spellings(secret: str) -> frozenset[str]:
    """Returns a secret as it is, and as it stands in a URL, in JSON, in Python, in a shell and in HTML."""
    in_json = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    quoted = {repr(secret)[1:-1], secret.replace("'", "'\"'\"'"), secret.replace("'", "'\\''")}
    in_html = secret
    for letter, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}.items():
        in_html = in_html.replace(letter, entity)
    return frozenset({secret, quote(secret), quote(secret, safe=""), quote_plus(secret), in_html} | in_json | quoted)


def without_tokens(text: str) -> str:
    """Returns text with secrets, and text that looks like a key, replaced by ***.

    Secrets are the values passed to `hide` and the values of environment variables with KEY, TOKEN, SECRET, PASSWORD,
    PASSWD, CREDENTIAL, AUTH, SAS or CONNECTION_STRING in their names, in all ways in which they are quoted. Keys are
    recognized by their context: a URL, a header, an assignment.
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
    """Returns a number with a noun in the singular or plural: "1 step", "2 batches", "3 entries"."""
    if number == 1:
        return f"1 {thing}"
    if thing.endswith("ry"):
        thing = f"{thing[:-1]}ie"
    return f"{number:.12g} {thing}{'es' if thing.endswith(('s', 'tch')) else 's'}"


def is_count(value: object) -> bool:
    """Returns whether a value read from a file is a plausible count."""
    return isinstance(value, int) and 0 <= value <= sys.maxsize


def has_length(thing: object) -> TypeGuard[Any]:
    """Returns True if `len(thing)` works; a dataset counts as having no length if its `__len__` raises.

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
    """Returns the class `name` of an optional package if the package is already loaded; never imports it.

    An object can only be an instance of a class if its module is loaded, so this suffices for `isinstance`.
    """
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(thing: object, module: str, name: str) -> bool:
    """`isinstance` against a class of a package that may not be loaded."""
    cls = optional_class(module, name)
    return cls is not None and isinstance(thing, cls)


def output_loss(outputs: Any) -> Any:
    """Returns the loss in a model's output: the entry `loss` of a mapping, else the first element.

    None if there is none.
    """
    if type(outputs) is dict or isinstance(outputs, Mapping):
        return outputs.get("loss")
    return outputs[0] if isinstance(outputs, (tuple, list)) and len(outputs) > 0 else None


def output_logits(outputs: Any) -> Any:
    """Returns the scores in a model's output: the entry `logits` of a mapping, else the first element of a tuple."""
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
