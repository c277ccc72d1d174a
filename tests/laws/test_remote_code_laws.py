"""Code comes from the installation alone: not from a model, a tokenizer or a data set, nor from the working directory.

Each place that loads one of them by name says so, and each interpreter that is started gets `-P`.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..cli.commands import SMALL, call, done, small
from ..sources.parsed import parse_file

SRC = Path(__file__).parents[2] / "src" / "trainwright"
LOADERS = ("from_pretrained", "from_config", "load_dataset", "load_dataset_builder", "pipeline")
# Classes that are made from JSON, which names no code.
READS_JSON = ("GenerationConfig",)
# Function -> why it need not pass `trust_remote_code=False`.
EXCEPTIONS = {
    "checkpoint.weights.make_pretrained": "a class of transformers itself, which never loads code (checked above it)",
    "cli.tasks.export.load_adapted.PeftModel": "puts weights into a model that is there",
}


def calls(node: ast.AST, place: str) -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls that load something by name, and their functions."""
    for child in ast.iter_child_nodes(node):
        inner = f"{place}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else place
        if isinstance(child, ast.Call):
            function = child.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            loaded = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            if name in LOADERS and loaded not in READS_JSON:
                yield f"{place}.PeftModel" if loaded == "PeftModel" else place, child
        yield from calls(child, inner)


def found() -> list[tuple[str, ast.Call]]:
    places = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        places += calls(parse_file(path), module)
    return places


def refuses_code(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    value = given.get("trust_remote_code")
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.lint
def test_all_that_is_loaded_by_name_refuses_code() -> None:
    assert [place for place, call in found() if not refuses_code(call) and place not in EXCEPTIONS] == []


@pytest.mark.lint
def test_every_exception_is_used() -> None:
    left = {place for place, call in found() if not refuses_code(call)}
    assert EXCEPTIONS.keys() - left == set()


@pytest.mark.lint
def test_no_code_is_trusted_anywhere() -> None:
    for path in SRC.rglob("*.py"):
        assert "trust_remote_code=True" not in path.read_text(encoding="utf-8"), path


def interpreters(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the word after `sys.executable` in each command."""
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.List | ast.Tuple):
            words = node.elts
        elif isinstance(node, ast.Call):
            words = node.args
        for before, word, after in zip([None, *words], words, [*words[1:], None], strict=False):
            for_uv = isinstance(before, ast.Constant) and before.value == "--python"
            if ast.unparse(word) == "sys.executable" and after is not None and not for_uv:
                yield after


@pytest.mark.lint
def test_every_interpreter_is_started_without_the_working_directory() -> None:
    trees = [parse_file(path) for path in sorted(SRC.rglob("*.py"))]
    words = [ast.unparse(after) for tree in trees for after in interpreters(tree)]
    assert len(words) >= 5
    assert set(words) == {"'-P'"}


# -- a real model whose code is in its folder --------------------------------------------------------------------------

EVIL = """\
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
class EvilConfig(BertConfig):
    model_type = {kind!r}
class EvilModel(BertForSequenceClassification):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run, `run`."""
    folder = tmp_path_factory.mktemp("trained")
    done("train", str(small(folder)))
    return folder


@pytest.fixture
def place(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "place"
    shutil.copytree(run, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plant(folder: Path, *, kind: str) -> Path:
    """Makes a model's folder one that brings code along; returns the file that the code writes when it runs."""
    marker = folder / "code-was-run"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker), kind=kind))
    model = "evil.EvilModel"
    auto = {"AutoConfig": "evil.EvilConfig", "AutoModelForSequenceClassification": model, "AutoModel": model}
    edit(folder / "config.json", model_type=kind, auto_map=auto)
    tokenizer = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=tokenizer)
    return marker


NAMED = SMALL.replace("  learn_tokenizer: {kind: words, vocab_size: 64}\n", "").replace(
    "output_dir: run", "output_dir: new"
)
WORDS = {
    "train": ["train", "named.yaml"],
    "plan": ["train", "named.yaml", "--dry-run"],
    "check": ["check", "named.yaml"],
    "from scratch": ["train", "named.yaml", "--set", "model.from_scratch=true"],
    "predict": ["predict", "run", "--data", "table.csv", "--task", "text-classification"],
    "eval": ["eval", "run", "--data", "table.csv"],
    "export": ["export", "run", "exported"],
    "merge": ["export", "adapter", "exported", "--merge"],
}


@pytest.mark.parametrize("kind", ["bert", "evil-kind"])  # with a class of transformers for it, and without one
@pytest.mark.parametrize("name", WORDS)
def test_the_code_of_a_model_is_not_run(name: str, kind: str, place: Path) -> None:
    """Also where somebody says yes: transformers asks on the terminal unless it is told."""
    folder = place / "run"
    marker = plant(folder, kind=kind)
    lines = [line for line in NAMED.splitlines() if not line.startswith("  config:")]
    lines.insert(lines.index("model:") + 1, "  path: run")
    (place / "named.yaml").write_text("\n".join(lines) + "\n")
    adapter = place / "adapter"
    adapter.mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "task_type": "SEQ_CLS"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    result = call(*WORDS[name], stdin="y\n" * 20)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not marker.exists()
    if kind == "evil-kind" and name != "export":
        assert result.exit_code in (1, 2), result.output
        assert result.output
