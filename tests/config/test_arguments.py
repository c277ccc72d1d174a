"""TrainingArguments as a value: construction, subclasses, copies, secrets, print."""

import copy
import dataclasses
import inspect
import json
import pickle
from dataclasses import dataclass, field

import pytest
import transformers

from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.enums import IntervalStrategy
from trainwright.config.summary import differing, grouped
from trainwright.errors import ArgumentError, LegacyNameWarning, UnknownArgumentError

from .._support.subprocesses import run_python


@dataclass
class Own(TrainingArguments):
    extra: int = 3
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.extra


@dataclass
class OwnerOfAnOldName(TrainingArguments):
    warmup_ratio: float = 0.5


@dataclass
class OwnSeq2Seq(Seq2SeqTrainingArguments):
    flavour: str = "plain"


class ByHand(TrainingArguments):
    def __init__(self, *args, flavour="plain", **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour


@dataclass
class WithoutParent(TrainingArguments):
    def __post_init__(self):
        pass


KINDS = [TrainingArguments, Seq2SeqTrainingArguments, Own, ByHand]


@pytest.mark.process
def test_neither_import_nor_construction_loads_a_framework():
    code = (
        "import sys\n"
        "from trainwright.config.arguments import TrainingArguments\n"
        "from trainwright.config.arguments import Seq2SeqTrainingArguments\n"
        "import trainwright.config.parser\n"
        "args = TrainingArguments('out', eval_strategy='epoch', bf16=True, fsdp=True)\n"
        "str(args), args.to_json_string(), args.process_index, args.get_process_log_level()\n"
        "loaded = {'torch', 'transformers', 'accelerate', 'numpy', 'yaml'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    run_python("-c", code)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_positions_names_and_older_names(kind):
    with pytest.warns(LegacyNameWarning, match="eval_strategy") as caught:
        args = kind("here", evaluation_strategy="epoch", learning_rate=1.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__ or kind is ByHand
    assert (args.output_dir, args.eval_strategy, args.learning_rate) == ("here", IntervalStrategy.EPOCH, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_tells_all_problems_at_once(kind):
    with pytest.raises(UnknownArgumentError) as caught:
        kind(learning_rat=1.0, fp16=True, bf16=True, use_ipex=True, optim="adamw", seed=-1)
    message = str(caught.value)
    assert message.startswith("5 problems")
    for word in ("Did you mean learning_rate?", "fp16=True and bf16=True", "use_ipex=True", "adamw_torch", "seed=-1"):
        assert word in message
    assert isinstance(caught.value, (TypeError, ValueError))


def test_one_problem_is_the_message_itself():
    with pytest.raises(ArgumentError, match=r"^fp16=True and bf16=True exclude each other\."):
        TrainingArguments(fp16=True, bf16=True)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_equal_and_of_the_same_kind(kind):
    args = kind("out", eval_strategy="steps", load_best_model_at_end=True, hub_token="secret")
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert type(twin) is kind
        assert twin == args


def test_replace_keeps_the_rest():
    args = Own("out", extra=5, eval_strategy="epoch", activation_checkpointing=True, report_to="wandb")
    other = dataclasses.replace(args, learning_rate=1.0)
    assert (other.extra, other.doubled, other.learning_rate, other.report_to) == (5, 10, 1.0, ["wandb"])
    assert dataclasses.replace(other, learning_rate=args.learning_rate) == args


def test_a_saved_dict_makes_the_same_arguments():
    args = TrainingArguments("out", eval_strategy="steps", optim="sgd", hub_token="secret", fsdp="full_shard")
    again = TrainingArguments(**json.loads(args.to_json_string()))
    assert again.hub_token is None
    assert dataclasses.replace(again, hub_token="secret") == args


def test_subclasses_add_fields():
    assert Own("o", extra=4).doubled == 8
    assert [f.name for f in dataclasses.fields(Own)][-2:] == ["extra", "names"]
    assert OwnSeq2Seq(flavour="x", predict_with_generate=True).flavour == "x"
    assert ByHand("o", flavour="rich").flavour == "rich"
    assert list(grouped(Own))[-1] == "Own"


def test_a_subclass_may_own_what_is_an_older_name_elsewhere():
    args = OwnerOfAnOldName(warmup_ratio=0.25)
    assert (args.warmup_ratio, args.warmup_steps) == (0.25, 0)


def test_a_subclass_that_skips_our_checks_still_refuses_unknown_names():
    assert WithoutParent().output_dir is None
    with pytest.raises(UnknownArgumentError, match="nonsense"):
        WithoutParent(nonsense=1)


def test_too_many_positions_and_double_values_are_type_errors():
    with pytest.raises(TypeError, match="by position and by name"):
        TrainingArguments("out", output_dir="other")  # type: ignore[misc]
    with pytest.raises(TypeError, match="by position"):
        TrainingArguments(*range(200))


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments, Own])
def test_the_signature_shows_the_fields(kind):
    names = {each.name for each in dataclasses.fields(kind)}
    assert set(inspect.signature(kind).parameters) == names
    kind()
    assert set(inspect.signature(kind).parameters) == names
    assert set(inspect.signature(kind.__init__).parameters) == {"self", *names}


def test_defaults_are_not_shared():
    first = TrainingArguments()
    second = TrainingArguments()
    first.include_for_metrics.append("loss")
    first.accelerator_config.split_batches = True
    assert second == TrainingArguments()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_never_written_out(kind):
    args = kind("out", hub_token="hf_very_secret")
    for text in (str(args), repr(args), args.to_json_string(), str(args.to_dict()), str(args.to_sanitized_dict())):
        assert "hf_very_secret" not in text
    assert args.hub_token == "hf_very_secret"


def test_a_token_is_not_in_an_error_either():
    with pytest.raises(ArgumentError) as caught, pytest.warns(LegacyNameWarning):
        TrainingArguments(hub_token="hf_one", push_to_hub_token="hf_two", push_to_hub_model_id="m")
    assert "hub_token" in str(caught.value)
    assert "hf_" not in str(caught.value)


def test_print_shows_first_what_differs():
    args = TrainingArguments("out", learning_rate=1e-3, seed=7, gradient_accumulation_steps=4)
    plan, head, *groups = str(args).split("\n\n")
    assert "8 per device x 4 accumulated x 1 process = 32 samples" in plan
    assert "learning_rate=0.001" in head
    assert "weight_decay" not in head
    assert len(groups) == len(grouped(TrainingArguments))
    for each in dataclasses.fields(args):
        assert f"\n  {each.name}=" in str(args)


def test_differing_names_what_was_set():
    assert differing(TrainingArguments()) == {}
    assert differing(TrainingArguments("out", activation_checkpointing=True, hub_token="s")) == {
        "output_dir": "out",
        "activation_checkpointing": True,
        "hub_token": "<HUB_TOKEN>",
    }
    assert differing(Own(extra=9)) == {"extra": 9}


def test_differing_serves_the_arguments_of_transformers():
    args = transformers.TrainingArguments("out", learning_rate=1.0, use_cpu=True)
    assert differing(args) == {
        "output_dir": "out",
        "learning_rate": 1.0,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }


def test_groups_hold_every_field_once():
    names = [each.name for members in grouped(Seq2SeqTrainingArguments).values() for each in members]
    assert sorted(names) == sorted(each.name for each in dataclasses.fields(Seq2SeqTrainingArguments))
    assert list(grouped(Seq2SeqTrainingArguments))[:3] == ["Run", "Length and batch", "Optimizer and schedule"]


def test_main_process_first_runs_the_block():
    with TrainingArguments().main_process_first(desc="map"):
        done = True
    assert done


def test_bf16_is_accepted_without_an_accelerator():
    """The original refuses it on a machine without one; torch's autocast on the CPU does bfloat16."""
    assert TrainingArguments(bf16=True).mixed_precision == "bf16"
