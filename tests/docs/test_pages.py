"""What the pages show runs as it stands there, and the site is built without a warning."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from trainwright.cli.recipe.schema import LearnPart
from trainwright.cli.tasks.models import learn

from .._support.small import StopAt
from ..parity import data, models
from ..sources.parsed import parse_file

ROOT = Path(__file__).parents[2]
ALL = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
PAGES = [path for path in ALL if "```python" in path.read_text(encoding="utf-8")]
# What a block prints, on the page below it.
OUTPUT = re.compile(r"\s*```text title=\"Output\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
NEAR = 0.15  # of a number with a decimal point; kernels of other machines add in another order
OF_OTHER_LIBRARIES = re.compile(r"^\[\d{4}-.*\n", re.MULTILINE)  # DeepSpeed's, if it is installed
MOST_COLUMNS = 80


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether a text is what a page shows: "..." stands for any text, and numbers with a decimal point may be near."""
    pattern = ""
    for part in re.split(r"(\.\.\.|\d+\.\d+(?:e-?\d+)?|\s+)", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif re.fullmatch(r"\d+\.\d+(?:e-?\d+)?", part):
            pattern += f"({NUMBER})"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    found = re.fullmatch(pattern, OF_OTHER_LIBRARIES.sub("", printed).strip(), re.DOTALL)
    if found is None:
        return False
    numbers = re.findall(r"\d+\.\d+(?:e-?\d+)?", shown)
    return all(abs(float(one) - float(other)) <= NEAR for one, other in zip(numbers, found.groups(), strict=True))


def new_model() -> Any:
    config = BertConfig(
        vocab_size=models.VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=2,
    )
    return models.seeded(lambda: BertForSequenceClassification(config))


def rows(size: int) -> list[dict[str, Any]]:
    return [row | {"labels": row["labels"] % 2} for row in data.ragged_texts(size)]


def write_instruct_model(folder: Path) -> str:
    """A Llama of a few thousand weights with a tokenizer and a chat template, as a directory."""
    template = (ROOT / "src/trainwright/cli/tasks/chat_templates/plain.jinja").read_text(encoding="utf-8")
    words = ["hello there, who are you? good day, a model"]
    tokenizer = learn(words, LearnPart(kind="bpe", vocab_size=300))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    models.seeded(lambda: LlamaForCausalLM(config)).save_pretrained(folder)
    return str(folder)


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # read by peft
@pytest.mark.filterwarnings("ignore:evaluation_strategy is an older name")  # which docs/migrate.md shows
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_runs_and_prints_what_is_shown_below_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = Sybil([PythonCodeBlockParser()]).parse(page)
    text = page.read_text(encoding="utf-8")
    if "instruct_model" in text:
        document.namespace.update(instruct_model=write_instruct_model(tmp_path / "instruct"))
    document.namespace.update(
        model=new_model(),
        new_model=new_model,
        tokenizer=data.tokenizer(),
        train_dataset=rows(24),
        eval_dataset=rows(9),
        stops_after=StopAt,
        torch=torch,
    )
    examples = list(document.examples())
    assert examples
    for example in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            example.evaluate()
        shown = OUTPUT.match(text, example.region.end)
        assert shown is not None or page.parent.name != "tutorials", "a block of a tutorial shows what it prints"
        if shown is not None:
            assert is_as_shown(shown[1], printed.getvalue()), (shown[1], printed.getvalue())


def test_another_output_is_seen() -> None:
    assert is_as_shown("step=1 loss=0.51 ...", "step=1  loss=0.4937\ntime 3 s")
    assert not is_as_shown("step=1 loss=0.51", "step=1 loss=0.9")
    assert not is_as_shown("step=1 loss=0.51", "step=2 loss=0.51")


def test_code_of_the_pages_fits_eighty_columns() -> None:
    wide = []
    for path in ALL[:-1]:
        is_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif is_code and len(line) > MOST_COLUMNS:
                wide.append(f"{path.name}:{number}: {line}")
    assert wide == []


def test_the_index_lists_every_page() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in ALL[:-1]} - {"index.md"}
    listed = re.findall(r"\]\(([\w/]+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert set(listed) == pages
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    assert sorted(re.findall(r"- ([\w/]+\.md)", navigation)) == sorted({*pages, "index.md"})


def test_the_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r'(?:\]\(|src="|srcset=")(?!https?:|#)([^)"#]+)', text)
    assert "docs/pictures/story-resume-light.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert "reproduce=" in text.partition("## What it adds")[0]


def test_the_tests_that_the_pages_name_exist() -> None:
    found = []
    for path in ALL:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"`(tests/[\w/.]+)`", text)
        if path.name == "remote.md":
            faults = text.partition("## Faults and promises")[2]
            names += [f"tests/capabilities/mirror/{name}" for name in re.findall(r"`(test_\w+\.py)`", faults)]
        found += [f"{path.name}: {name}" for name in names if not (ROOT / name).exists()]
    assert found == []


# What reads as a translation; "there is no" is fine.
STRANGE = re.compile(
    r"goes on\b|\btold of\b|comes of it|(?<!here )\b(is|are) no (?!longer|more|less)\w"
    r"|\| there \||\bas there\b|; here it"
)


def test_pages_and_messages_are_plain_english() -> None:
    found = [
        f"{path.name}:{number}: {line}"
        for path in ALL
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if STRANGE.search(line)
    ]
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = parse_file(path)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        found += [
            f"{path.name}:{one.lineno}: {one.value!s}"
            for one in texts
            if id(one) not in prose and STRANGE.search(str(one.value))
        ]
    assert found == []
