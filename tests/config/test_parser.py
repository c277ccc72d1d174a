"""HfArgumentParser beside transformers', and what it can do more."""
# ruff: noqa: RUF009 -- HfArg() makes a dataclass field

import dataclasses
import json
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import transformers

from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.parser import HfArg, HfArgumentParser, make_choice_type_function, string_to_bool
from trainwright.errors import ArgumentError, LegacyNameWarning


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    THREE = 3


@dataclass
class Basic:
    foo: int
    bar: float
    baz: str
    flag: bool


@dataclass
class Rich:
    number: int = 42
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow", 3] = "fast"
    on: bool = True
    off: bool = False
    maybe: Optional[bool] = None  # noqa: UP045 -- this spelling must be understood
    maybe_number: int | None = None
    maybe_old: Union[int, None] = None  # noqa: UP007
    many: list[int] = field(default_factory=lambda: [1, 2])
    maybe_many: list[str] | None = None
    words: str | None = None
    text_or_dict: dict | str | None = None
    long_name_here: str = "x"
    short: str = HfArg(default="s", aliases=["--sh", "-s"], help="A short one, 100 %.")


@dataclass
class Required:
    needed: list[str]
    colour: Colour = field()


@dataclass
class Other:
    model: str = field(default="m", metadata={"help": "Which model."})
    group_by_length: bool = False


@dataclass
class Ambiguous:
    what: int | float | None = None


@dataclass
class Titled:
    _argument_group_name = "my own group"
    x: int = 1


RICH = [
    "",
    "--number 3 --colour blue --mode 3 --no_on --off",
    "--number=3 --on false --off true --maybe 1",
    "--no-on --off=0 --maybe no",
    "--on --off --maybe_number 5 --maybe_old 6",
    "--many 4 5 6 --maybe_many a b",
    "--words hello --long-name-here y",
    "--long_name_here y --text_or_dict {}",
    "--sh a",
    "-s b",
    "--colour red --mode slow --colour 3",
]
WRONG = [
    (Rich, "--colour green"),
    (Rich, "--mode other"),
    (Rich, "--number x"),
    (Rich, "--on perhaps"),
    (Basic, "--foo 1"),
    (Required, ""),
]


def both(kind, **settings):
    return HfArgumentParser(kind, **settings), transformers.HfArgumentParser(kind, **settings)


@pytest.mark.parametrize("line", RICH)
def test_lines_mean_the_same(line):
    ours, theirs = both(Rich)
    words = line.split()
    result = ours.parse_args_into_dataclasses(words, look_for_args_file=False)
    assert result == theirs.parse_args_into_dataclasses(words, look_for_args_file=False)


@pytest.mark.parametrize("line", ["--foo 1 --bar 2 --baz x", "--foo 1 --bar 2 --baz x --flag", "--f 1 --ba"])
def test_required_fields_and_bare_flags_mean_the_same(line):
    def outcome(parser):
        try:
            return parser.parse_args_into_dataclasses(line.split(), look_for_args_file=False)
        except SystemExit as stop:
            return stop.code

    ours, theirs = both(Basic)
    assert outcome(ours) == outcome(theirs)


@dataclass
class Declared:
    """Types as the documentation of the parser declares them."""

    needed_list: list[int]
    needed_colour: Colour = field()
    need_bool: bool = field()
    on: bool = True
    maybe_on: Optional[bool] = True  # noqa: UP045
    maybe_off: bool | None = False
    maybe: bool | None = field(default=None)
    mode: Literal["fast", "slow", 3] = "fast"
    maybe_mode: Optional[Literal["a", "b"]] = None  # noqa: UP045
    colour: Colour = "blue"
    maybe_colour: Colour | None = None
    many: list[float] = field(default_factory=list)
    maybe_many: list[str] | None = None
    number: float | None = field(default=None, metadata={"help": "help message"})
    made: str = field(default_factory=lambda: "made")


@pytest.mark.parametrize("kind", [Basic, Rich, Required, Declared])
def test_options_are_declared_alike(kind):
    """As tests of the parser compare them: all that argparse keeps of an option; choices by what they parse to."""

    def declared(action):
        parts = {name: value for name, value in vars(action).items() if name not in ("container", "type", "help")}
        words = [*map(str, action.choices or ()), "other"] if action.choices else []
        is_bool = getattr(action.type, "__name__", "") == "string_to_bool"
        kind_of = [action.type(word) for word in words] or ("bool" if is_bool else action.type)
        return type(action), parts, kind_of

    ours, theirs = ([declared(action) for action in parser._actions] for parser in both(kind))
    assert ours == theirs


def test_a_flag_that_is_on_can_be_turned_off_in_any_place():
    lines = ["", "--on", "--no_on", "--no-on --on", "--on --no_on", "--on no", "--maybe_on 0", "--no_maybe_on"]
    for line in lines:
        words = f"--needed_list 1 --needed_colour red {line}".split()
        ours, theirs = (one.parse_args_into_dataclasses(words, look_for_args_file=False) for one in both(Declared))
        assert ours == theirs


@pytest.mark.parametrize(("kind", "line"), WRONG)
def test_wrong_lines_end_with_a_usage_message(kind, line, capsys):
    for parser in both(kind):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args_into_dataclasses(line.split(), look_for_args_file=False)
        assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


# Words that people type; argparse takes an option by its beginning, so some of them begin several options.
WORDS = {
    "--lr 1e-4": "ambiguous option: --lr .*Did you mean learning_rate[?]",
    "--warmup=10": "ambiguous option: --warmup.*Did you mean warmup_steps[?]",
    "--save 3": "ambiguous option: --save could match .*--save-steps.*[^.]$",
    "--batch_size 8 --epochs=3": "Did you mean per_device_train_batch_size[?] Did you mean num_train_epochs[?] --help",
    "--gpus 4": "Unknown arguments: --gpus 4[.] .*torchrun",
    "--zzz 4": "Unknown arguments: --zzz 4[.] --help",
}


@pytest.mark.parametrize("line", WORDS)
def test_word_that_people_use_is_answered_with_the_name_of_the_option(line: str, capsys: Any) -> None:
    with pytest.raises((SystemExit, ArgumentError)) as refused:
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    said = capsys.readouterr().err or str(refused.value)
    assert re.search(WORDS[line], said.strip()), said


def test_an_ambiguous_type_is_an_error():
    for kind in (HfArgumentParser, transformers.HfArgumentParser):
        with pytest.raises(ValueError, match="what"):
            kind(Ambiguous)


def test_several_dataclasses_and_other_options():
    outcomes = []
    for parser in both([Other, TrainingArguments]):
        parser.add_argument("--task", default="none")
        words = ["--model", "big", "--learning_rate", "0.5", "--task", "x"]
        outcomes.append(parser.parse_args_into_dataclasses(words, look_for_args_file=False))
    (model, args, rest), (their_model, their_args, their_rest) = outcomes
    assert (model, rest) == (their_model, their_rest)
    assert args == their_args
    assert args.learning_rate == 0.5


def test_unknown_words_are_returned_or_refused():
    for parser in both(Other):
        model, rest = parser.parse_args_into_dataclasses(
            ["--model", "b", "--what", "1"], return_remaining_strings=True, look_for_args_file=False
        )
        assert (model, rest) == (Other("b"), ["--what", "1"])
        with pytest.raises(ValueError, match="what"):
            parser.parse_args_into_dataclasses(["--what", "1"], look_for_args_file=False)


def test_files_of_arguments(tmp_path, monkeypatch):
    (tmp_path / "script.args").write_text("--number 1 --words from_script")
    (tmp_path / "named.args").write_text("--number 2 --words from_name")
    (tmp_path / "other.args").write_text("--number 3")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py"), "--words", "from_line"])
    cases = [
        {},
        {"args": []},
        {"look_for_args_file": False},
        {"args_filename": str(tmp_path / "named.args")},
        {"args": ["--cfg", str(tmp_path / "other.args"), "--maybe_number", "4"], "args_file_flag": "--cfg"},
        {
            "args": ["--cfg", str(tmp_path / "other.args"), "--cfg", str(tmp_path / "named.args")],
            "args_file_flag": "--cfg",
        },
        {"args_filename": str(tmp_path / "missing.args")},
    ]
    for case in cases:
        ours, theirs = both(Rich)
        assert ours.parse_args_into_dataclasses(**case) == theirs.parse_args_into_dataclasses(**case), case


def test_dicts_and_files(tmp_path):
    values = {"number": 3, "words": "w", "model": "big"}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("number: 3\nwords: w\nmodel: big\n")
    for parser in both([Rich, Other]):
        expected = (Rich(number=3, words="w"), Other("big"))
        assert parser.parse_dict(values) == expected
        assert parser.parse_json_file(tmp_path / "a.json") == expected
        assert parser.parse_json_file(str(tmp_path / "a.json")) == expected
        assert parser.parse_yaml_file(tmp_path / "a.yaml") == expected
        with pytest.raises(ValueError, match="stray"):
            parser.parse_dict({**values, "stray": 1})
        assert parser.parse_dict({**values, "stray": 1}, allow_extra_keys=True) == expected


def test_a_file_without_names_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ArgumentError, match="holds list"):
        HfArgumentParser(Rich).parse_yaml_file(tmp_path / "a.yaml")


def test_parse_dict_understands_older_names_and_guesses():
    parser = HfArgumentParser([Other, TrainingArguments])
    with pytest.warns(LegacyNameWarning) as caught:
        other, args = parser.parse_dict({"evaluation_strategy": "epoch", "warmup_ratio": 0.1, "group_by_length": True})
    assert [str(w.message).split()[0] for w in caught] == ["evaluation_strategy", "warmup_ratio"]
    assert (args.eval_strategy, args.warmup_steps) == ("epoch", 0.1)
    assert other.group_by_length is True  # Other's own field, not the older name
    assert args.train_sampling_strategy == "random"
    with pytest.raises(ArgumentError, match="Did you mean learning_rate"):
        parser.parse_dict({"learning_rates": 1.0})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--evaluation_strategy steps --eval_steps 5", {"eval_strategy": "steps", "eval_steps": 5}),
        ("--no_cuda", {"use_cpu": True}),
        ("--no-cuda false", {"use_cpu": False}),
        ("--warmup_ratio 0.1", {"warmup_steps": 0.1}),
        ("--per_gpu_train_batch_size=4", {"per_device_train_batch_size": 4}),
        ("--group_by_length --adafactor", {"train_sampling_strategy": "group_by_length", "optim": "adafactor"}),
        ("--optim adamw_hf", {"optim": "adamw_torch"}),
        ("--fp16_backend auto --sharded_ddp=", {}),
    ],
)
def test_a_line_of_older_names(line, expected):
    with pytest.warns(LegacyNameWarning):
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            line.split(), look_for_args_file=False
        )
    assert {name: getattr(args, name) for name in expected} == expected


def test_older_names_do_not_stand_in_the_way_of_a_users_option():
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--no_cuda", action="store_true")
    args, rest = parser.parse_args_into_dataclasses(["--no_cuda"], look_for_args_file=False)
    assert (rest.no_cuda, args.use_cpu) == (True, False)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--fsdp", {"fsdp": True}),
        ("--activation_checkpointing", {"activation_checkpointing": True}),
        ("--report_to wandb mlflow", {"report_to": ["wandb", "mlflow"]}),
        ("--report_to none", {"report_to": []}),
        ("--debug underflow_overflow", {"debug": ["underflow_overflow"]}),
        ("--include_num_input_tokens_seen", {"include_num_input_tokens_seen": "all"}),
        ("--torch_compile", {"torch_compile": True}),
        ("--torch_compile false", {"torch_compile": False}),
        ("--torch_compile regional", {"torch_compile": "regional"}),
        ("--include_num_input_tokens_seen non_padding", {"include_num_input_tokens_seen": "non_padding"}),
        ('--lr_scheduler_kwargs {"num_cycles":2}', {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ("--optim_target_modules all-linear", {"optim_target_modules": "all-linear"}),
        ("--no_logging_nan_inf_filter", {"logging_nan_inf_filter": False}),
        ("--trackio_static_space_id False", {"trackio_static_space_id": False}),
        ("--tf32 false --disable_tqdm true", {"tf32": False, "disable_tqdm": True}),
        ("--eval_steps 0.5 --eval_strategy steps", {"eval_steps": 0.5}),
        ("--local-rank=0", {"local_rank": 0}),
        ("--generation_num_beams 4 --predict_with_generate", {"generation_num_beams": 4}),
    ],
)
def test_all_arguments_can_be_typed(line, expected):
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(
        line.split(), look_for_args_file=False
    )
    assert {name: getattr(args, name) for name in expected} == expected
    if not line:
        assert args == Seq2SeqTrainingArguments()


def test_the_parser_of_transformers_takes_our_arguments():
    words = ["--learning_rate=0.5", "--eval_strategy=epoch", "--fsdp=full_shard", "--report_to=wandb"]
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir=out", *words], look_for_args_file=False
    )
    assert args == TrainingArguments(
        "out", learning_rate=0.5, eval_strategy="epoch", fsdp="full_shard", report_to="wandb"
    )


def test_help_is_grouped_and_fits_in_100_columns():
    text = HfArgumentParser([Other, Titled, Seq2SeqTrainingArguments], prog="train").format_help()
    assert max(len(line) for line in text.splitlines()) <= 100
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["options", "Other", "my own group"]
    assert {"Run", "Optimizer and schedule", "Generation"} <= set(titles)
    assert text.startswith("usage: train [options]")
    assert "--learning_rate X " in text
    for field_ in dataclasses.fields(Seq2SeqTrainingArguments):
        assert f"--{field_.name} " in text
    assert "evaluation_strategy" not in text
    assert "hf_" not in text


def test_help_of_required_options():
    assert "usage: t --needed NEEDED --colour COLOUR [options]" in HfArgumentParser(Required, prog="t").format_help()


def test_hf_arg_makes_a_field():
    @dataclass
    class Made:
        x: int = HfArg(default=1, aliases="-x", help="Help.", metadata={"metavar": "HOW_MANY"})
        y: list[Any] = HfArg(default_factory=list)
        z: Path = HfArg(default=Path("a"), kw_only=True)

    assert dataclasses.fields(Made)[0].metadata == {"metavar": "HOW_MANY", "aliases": "-x", "help": "Help."}
    assert Made() == Made(1, [], z=Path("a"))


@pytest.mark.parametrize("word", ["yes", "True", "T", "y", "1", "no", "FALSE", "f", "n", "0", True, False])
def test_words_of_truth_are_the_same(word):
    assert string_to_bool(word) is transformers.hf_argparser.string_to_bool(word)


def test_choices_keep_their_type():
    convert = make_choice_type_function(["a", 3])
    assert (convert("a"), convert("3"), convert("z")) == ("a", 3, "z")
