"""Short forms of values as people write them."""

import pytest

from trainwright import HfArgumentParser, TrainingArguments
from trainwright.config.coerce import parse_duration
from trainwright.errors import ArgumentError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("90s", 90),
        ("20min", 1200),
        ("8h", 28800),
        ("1h30m", 5400),
        ("1h 30min 5s", 5405),
        ("1.5h", 5400),
        ("2d", 172800),
        (" 10 SEC ", 10),
        ("45", 45),
        (45, 45),
        (0.5, 0.5),
        ("0.5", 0.5),
    ],
)
def test_what_is_written_is_meant(written, meant):
    assert parse_duration(written) == meant


@pytest.mark.parametrize(
    "written", ["", "soon", "8 hours", "8h30", "h", "0", "-5s", "-1", 0, -1, True, [1], "inf", "nan"]
)
def test_anything_else_is_refused_with_examples(written):
    with pytest.raises(ValueError, match="'1h30m'"):
        parse_duration(written)


@pytest.mark.parametrize("name", ["max_train_time", "save_every", "save_keep_every"])
def test_arguments_hold_seconds_and_name_the_field_that_is_wrong(name):
    args = TrainingArguments(**{name: "1h30m"})
    assert getattr(args, name) == 5400
    assert getattr(TrainingArguments(**{name: args.to_dict()[name]}), name) == 5400
    parsed = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([f"--{name}", "20min"])[0]
    assert getattr(parsed, name) == 1200
    with pytest.raises(ArgumentError, match=f"{name}: '8 hours'.*h and d are"):
        TrainingArguments(**{name: "8 hours"})
