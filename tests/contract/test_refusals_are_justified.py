"""Every `raise` in src has a justification: a row of tests/compat/refusals.py, or an entry of the lists below."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.config.rules.stages import Stage, select_rules

from ..compat.refusals import CALLS, NOT_RUN, PROTECTED, RAISES
from ..laws.members import read_laws
from ..sources.parsed import parse_file

pytestmark = pytest.mark.lint

SRC = Path(__file__).parents[2] / "src" / "trainwright"

# Features that transformers' Trainer does not have: there is nothing to compare. Modules, with all below them.
OURS = (
    "cli",
    "command_line",
    "journal",
    "preflight",
    "config.plan_words",  # a run that is planned, not started
    "engine.zero_stand_ins",  # likewise
    "distributed.process_group.simulated_process_group",
    "data.sample_filter",
    "data.positions.LoaderPosition.exclude",
    "data.streaming.reader.StreamItems.exclude",
    "data.identity",
    "data.row_names",
    "run.checks.check_id_column",  # names of rows that are kept from run to run
    "loop.extension.Extensions",
    "loop.extension.SaveListeners",
    "loop.extension.ReportListeners",  # extensions of one's own
    "run.checks.check_extension",
    "data.streaming.lookahead_buffer",
    "data.sampler_factory.training_order",  # batches by length
    "optim.parameter_groups.layer_factors",
    "optim.parameter_groups._with_patterns",  # rates by layer
    "optim.own_optimizers.muon_groups",
    "optim.adamw_bf16.AdamWBF16",
    "optim.factory._over_the_model",  # Muon
    "config.coerce.parse_duration",
    "config.coerce._parse_text",
    "config.coerce.parse_steps",  # lengths of time, steps
    "data.length_sampler.check_lengths",  # lengths that a batch holds
    "evaluation.eval_loop.StreamingMetric.result",  # metrics by batch
    "evaluation.eval_loop.PredictionAccumulator.output",  # a recorded number with the name of a metric
    "support.loss_kernels",
    "support.patches._check_kept",  # activations that are kept
    "data.columns.named_columns",
    "data.columns.check_named",  # columns that a class or a collator names
    "loop.step.divide_by_items",
    "engine.deepspeed.DeepSpeedEngine.scale_gradients",  # losses with their items
    "loop.driven",
    "run.checks.check_drives_itself",  # loops of one's own
    "loop.fit.prepared_window",
    "loop.fit.wait_for_data",  # windows of one's own, workers that a signal ended
    "checkpoint.training_state.collect_item_states",
    "checkpoint.training_state.load_items",
    "optim.schedules.set_rate",
    "optim.schedules._check_scaled",  # commands to a run under way
    "run.resume.check_cooldown",
    "run.resume.check_cooldown_alone",
    "run.frozen",
    "run.thaw",  # evaluations beside training
    "support.deadline",  # partners that hang
    "hub.outbox",  # uploads that wait in a directory, where others may place files
    "support.door",
    "search.search_record",  # files that others may have written
    *(
        f"capabilities.{name}.{place}".removesuffix(".")
        for name, law in read_laws().items()
        for place in getattr(law, "OURS", ())
    ),
)
# What people do not reach with a configuration, a data set, a model or a callback: wrong calls of Python, protocols.
INTERNAL = (
    "config.setting",
    "capability_table.check_capability",
    "capability_table.find_method",  # a copy of the package that lacks a capability
    "config.rules.stages.rule",
    "config.parser.string_to_bool",
    "config.parser._members",
    "state",
    "support.tensor_tree",
    "run.checks.need_optimizer",
    "run.run.Run.check_not_training",
    "run.run.Run.check_not_evaluating",
    "data.length_sampler.LengthGroupedSampler.__init__",
)
# Packages and services that are not installed or not set up: transformers needs the same ones.
MISSING = ("trackers", "errors.needs_package")
# An error that came is passed on, as it is or with more words.
PASSED_ON = (
    "config.rules.stages.refuse",
    "distributed.collectives.broadcast_from_main",
    "engine.sharded_state._write",
    "distributed.world.reading_launchers_variables",
    "run.checks.make_output_dir",
    "run.refusal.with_known_keywords",  # a TypeError of Python itself there
)

ROWS = (
    *(where for _, _, where in (*RAISES, *CALLS)),
    *NOT_RUN,
    *(place for _, places in PROTECTED for place in places),
)
JUSTIFIED = OURS + INTERNAL + MISSING + PASSED_ON + ROWS
PYTHONS = ("AttributeError", "KeyError", "IndexError", "AssertionError", "KeyboardInterrupt", "SystemExit")


def raises(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """Where something is raised, and what; a bare `raise` passes on what came."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from raises(child, f"{place}.{child.name}")
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            yield place, ast.unparse(raised)
        yield from raises(child, place)


@functools.cache
def places() -> list[str]:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        tree = parse_file(path)
        found += [place for place, what in raises(tree, module) if what not in PYTHONS]
    return found


def covers(entry: str, place: str) -> bool:
    return place == entry or place.startswith(entry + ".")


def test_no_refusal_is_without_a_justification() -> None:
    assert [place for place in places() if not any(covers(entry, place) for entry in JUSTIFIED)] == []


def test_every_justification_has_a_refusal() -> None:
    rows = [place for place in ROWS if not place.startswith("rules.")]
    entries = (*OURS, *INTERNAL, *MISSING, *PASSED_ON, *rows)
    assert [entry for entry in entries if not any(covers(entry, place) for place in places())] == []


OWN_FIELDS = {
    "profiled_steps",
    "recorded_steps",
    "known_levers",
    "known_average",
    "best_by_the_average",
    "known_evaluator",
    "best_is_known_at_its_step",
    "rate_does_not_wait_for_metrics",
    "layer_above_share",
    "rates_by_pattern",
    "one_way_to_form_batches",
    "a_budget_or_a_batch_size",
    "formed_batches_have_their_order",
    "formed_batches_stay_whole",
    "packing_needs_a_length",
    "open_end_is_possible",
    "token_is_text",
    "mirror_is_a_url",
    "branch_has_its_own_directory",
    "cooldown_in_steps",
    "cooldown_needs_its_schedule",
    "source_shares",
    "mixtures_have_their_order",
}
# The original raises there too, with devices or processes that a test of one process on a CPU does not have.
ELSEWHERE = {"nccl_needs_a_gpu", "one_sharding", "sharded_best_needs_full_checkpoints", "bf16_is_supported"}


@pytest.mark.parametrize("stage", [Stage.CONSTRUCTION, Stage.START])
def test_no_rule_that_refuses_is_without_a_justification(stage: Stage) -> None:
    named = {where.removeprefix("rules.") for where in ROWS if where.startswith("rules.")}
    also = {"one_accumulation", "evaluation_needs_data", "first_evaluation_needs_data"}  # rows of the same fields
    found = {rule.name for rule in select_rules(stage)}
    assert found - named - OWN_FIELDS - ELSEWHERE - also == set()
