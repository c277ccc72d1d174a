"""Checks of the fields whose feature this version does not have: they are refused, not ignored."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from trainwright import Seq2SeqTrainer, Seq2SeqTrainingArguments
from trainwright.config import rules
from trainwright.errors import NotYetError

from .bench import Bench, Toy, samples, seeded
from .table import companion, shows

ASKED: dict[str, Any] = {
    "deepspeed": {"train_batch_size": "auto"},
    "fsdp": True,
    "parallelism_config": ParallelismConfig(),
    "push_to_hub": True,
}


def a_feature_that_is_not_there_is_refused(bench: Bench, *, name: str) -> None:
    """The message names the field, and says what to do meanwhile."""
    with pytest.raises(NotYetError, match=rf"(?s){name}=.* is not there yet\. [A-Z].+\."):
        bench.trainer(**{name: ASKED[name]})


for _name in ASKED:
    shows(_name)(partial(a_feature_that_is_not_there_is_refused, name=_name))


def _needs_the_hub(bench: Bench, **settings: Any) -> None:
    ((name, value),) = settings.items()
    written = bench.args(**settings).to_dict()[name]
    assert written == ("<HUB_TOKEN>" if name == "hub_token" else value)
    assert rules.idle(bench.args(**settings)) == [f"{name} has no effect without push_to_hub."]
    assert rules.idle(bench.args()) == []


@companion("hub_model_id", "it names the repository, and push_to_hub is not there yet")
def no_repository_is_made(bench: Bench) -> None:
    _needs_the_hub(bench, hub_model_id="me/model")


@companion("hub_strategy", "it says when to upload, and push_to_hub is not there yet")
def nothing_is_uploaded_at_any_time(bench: Bench) -> None:
    _needs_the_hub(bench, hub_strategy="end")


@companion("hub_token", "it opens the repository, and push_to_hub is not there yet")
def no_token_is_used_or_written_out(bench: Bench) -> None:
    _needs_the_hub(bench, hub_token="hf_secret")
    trainer = bench.train(hub_token="hf_secret", save_strategy="epoch")
    assert "hf_secret" not in str(trainer.args) + repr(trainer.args) + trainer.args.to_json_string()


@companion("hub_private_repo", "it is about a new repository, and push_to_hub is not there yet")
def no_repository_is_private(bench: Bench) -> None:
    _needs_the_hub(bench, hub_private_repo=True)


@companion("hub_always_push", "it is about uploads, and push_to_hub is not there yet")
def no_upload_is_under_way(bench: Bench) -> None:
    _needs_the_hub(bench, hub_always_push=True)


@companion("hub_revision", "it names the branch, and push_to_hub is not there yet")
def no_branch_is_uploaded_to(bench: Bench) -> None:
    _needs_the_hub(bench, hub_revision="dev")


@shows("predict_with_generate")
def generation_in_evaluation_is_refused(bench: Bench) -> None:
    args = bench.args(Seq2SeqTrainingArguments, predict_with_generate=True)
    with pytest.raises(NotYetError, match=r"predict_with_generate=True .*model\.generate"):
        Seq2SeqTrainer(model=seeded(Toy), args=args, train_dataset=samples())


def _needs_generation(bench: Bench, **settings: Any) -> None:
    ((name, value),) = settings.items()
    args = bench.args(Seq2SeqTrainingArguments, **settings)
    assert args.to_dict()[name] == value
    assert rules.idle(args) == [f"{name} has no effect without predict_with_generate."]


@companion("generation_max_length", "it is about generation, and predict_with_generate is not there yet")
def nothing_of_this_length_is_generated(bench: Bench) -> None:
    _needs_generation(bench, generation_max_length=5)


@companion("generation_num_beams", "it is about generation, and predict_with_generate is not there yet")
def nothing_is_searched_with_beams(bench: Bench) -> None:
    _needs_generation(bench, generation_num_beams=2)


@companion("generation_config", "it is about generation, and predict_with_generate is not there yet")
def nothing_is_generated_by_a_configuration(bench: Bench) -> None:
    _needs_generation(bench, generation_config="some/model")


@companion("sortish_sampler", "transformers accepts it and sorts nothing; train_sampling_strategy sorts")
def sorting_is_asked_for_under_another_name(bench: Bench) -> None:
    args = bench.args(Seq2SeqTrainingArguments, sortish_sampler=True)
    (message,) = rules.idle(args)
    assert message.startswith("sortish_sampler has no effect")
    assert "train_sampling_strategy='group_by_length'" in message
