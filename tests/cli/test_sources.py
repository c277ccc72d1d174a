"""A file whose data are several sources: names, shares, what is refused, and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.recipe.json_schema import json_schema
from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.tasks.source import load
from trainwright.errors import RecipeError

from .commands import SMALL, call

NAMES = {"code": 24, "chat": 12, "web": 60}


def written(folder: Path, data: Any, **others: Any) -> Path:
    for number, (name, size) in enumerate(NAMES.items()):
        rows = [{"text": f"{name} {i}", "label": "ab"[(i + number) % 2]} for i in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "model").mkdir(exist_ok=True)
    value = {"task": "text-classification", "model": {"path": "model"}, "data": data, **others}
    (folder / "config.yaml").write_text(json.dumps(value, indent=1))
    return folder / "config.yaml"


def test_sources_have_names_and_shares(tmp_path: Path) -> None:
    tree = read_tree(
        written(
            tmp_path, [{"path": "code.jsonl", "share": 0.7}, {"path": "chat.jsonl", "name": "talk", "share": "all"}]
        )
    )
    recipe = checked(tree, tmp_path)
    assert recipe.training["mixture"] == {"code": 0.7, "talk": "all"}
    material = load(recipe, tree)
    found = [(row.name.source, row["text"].split()[0]) for row in material.train]
    assert len(found) == 33, "a tenth is held out"
    assert set(found) == {("code", "code"), ("talk", "chat")}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"path": "none.jsonl"}], "none.jsonl"),
        (["code.jsonl"], "form"),
        ([{"path": "code.jsonl", "weight": 1}], "weight is not known. A source has: path, name, share"),
        ([{"path": "code.jsonl"}, {"path": "chat.jsonl", "name": "code"}], "two sources are named 'code'"),
        ([{"path": "code.jsonl", "share": 1}, {"path": "chat.jsonl"}], "'chat' has no share"),
        ([{"path": "code.jsonl", "share": -1}], "-1 of 'code'"),
        ({"sources": [{"path": "code.jsonl"}], "train": "chat.jsonl"}, "Keep only one"),
    ],
)
def test_what_is_wrong_is_named(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        checked(read_tree(written(tmp_path, data)), tmp_path)


FIVE_LINES = "task: text-classification\nmodel: {path: model}\ndata:\n  sources:\n    - {path: code.jsonl, share: 1}\n"


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        ("path: none.jsonl\n      share: 1", 6, "there is no file"),
        ("path: chat.jsonl\n      share: half", 7, "'half' of 'chat'"),
        ("path: chat.jsonl\n      shares: 1", 7, "shares is not known. Did you mean share?"),
        ("path: chat.jsonl\n      name: code\n      share: 1", 7, "two sources are named 'code'"),
        ("path: chat.jsonl", 6, "'chat' has no share"),
        ("chat.jsonl", 6, "form"),
    ],
)
@pytest.mark.parametrize("is_short", [False, True])
def test_an_error_in_a_source_points_to_its_line(
    source: str, line: int, said: str, is_short: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, [])
    text = f"{FIVE_LINES}    - {source}\n"
    path.write_text(text.replace("  sources:\n", "\n") if is_short else text)
    with pytest.raises(RecipeError) as caught:
        checked(read_tree(path), tmp_path)
    assert re.search(rf"config\.yaml:{line}: .*{re.escape(said)}", str(caught.value)), caught.value


def test_the_schema_takes_both_forms() -> None:
    data = json_schema()["properties"]["data"]
    assert data["type"] == ["object", "array"]
    assert data["items"]["required"] == ["path"]
    assert data["properties"]["sources"]["items"] == data["items"]


@pytest.mark.costly
def test_three_files_are_trained_by_shares_with_a_ledger_of_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = "".join(
        f"    - {{path: {name}.jsonl, share: {share}}}\n" for name, share in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
    )
    written(tmp_path, {})
    text = SMALL.replace("  train: table.csv\n", f"  sources:\n{sources}") + "  ledger: true\n"
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert "50.0% of the samples" in call("train", "config.yaml", "--dry-run").output
    done = call("train", "config.yaml")
    assert done.exit_code == 0, done.output
    assert "50.0% of the samples" in done.output
    journal = (tmp_path / "run" / "trainer_state.json").read_text()
    assert json.loads(journal)["global_step"] == 8
    resumed = call("resume", "run", "training.max_steps=9")
    assert resumed.exit_code == 0, resumed.output
    listed = json.loads(call("ledger", "run", "text", "-n", "99", "--json").output)
    assert {one["source"] for one in listed} == set(NAMES)
    for one in listed:
        assert one["text"].split()[0] == one["source"], "the rows of a mixture come source by source"
    assert len({one["text"] for one in listed}) == len(listed) > 20
    of_one_file = json.loads(call("ledger", "run", "text", "-n", "99", "--data", "code.jsonl", "--json").output)
    assert [one["text"] for one in of_one_file] == [one["text"] if one["source"] == "code" else None for one in listed]
    (tmp_path / "code.jsonl").write_text('{"text": "another", "label": "a"}')
    refused = call("ledger", "run", "text", "--data", "code.jsonl")
    assert "none of the 1 row of code.jsonl is among them" in " ".join(refused.output.split())
    assert refused.exit_code == 2
