"""Table of checks, the facts that they examine, and the report of their findings. No check uses the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright._types import Batch, JSONObject
from trainwright.config.plans import StepPlan
from trainwright.config.protocol import Arguments
from trainwright.preflight.memory.memory_plan import MemoryPlan
from trainwright.preflight.memory.run_plan import RunPlan
from trainwright.preflight.rows import Rows
from trainwright.preflight.tables import Table
from trainwright.support.findings import SEVERITIES, Check, Finding, Look, Moment, Section, Severity
from trainwright.support.html_table import html_section, html_table

if TYPE_CHECKING:
    from trainwright.preflight.against import AgainstReport

logger = logging.getLogger(__name__)


def _gravest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda one: -SEVERITIES.index(one.severity)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of the checks."""

    findings: tuple[Finding, ...] = ()  # worst first
    passed: tuple[str, ...] = ()  # checks without findings
    not_done: tuple[tuple[str, str], ...] = ()  # checks that could not run, and the reason
    memory: MemoryPlan | None = None  # the memory plan, if requested
    plan: RunPlan | None = None  # the plan of a run of many processes, if requested
    against: AgainstReport | None = None  # the first steps with other packages, if requested
    sections: tuple[Section, ...] = ()  # further facts, shown after the findings

    @property
    def is_fine(self) -> bool:
        """Returns True if nothing worse than a note was found."""
        return self.worst in (None, "note")

    @property
    def worst(self) -> Severity | None:
        """Returns the highest severity of the findings; None without findings."""
        return max((one.severity for one in self.findings), key=SEVERITIES.index, default=None)

    def of(self, check: str) -> tuple[Finding, ...]:
        """Returns the findings of one check."""
        return tuple(one for one in self.findings if one.check == check)

    def with_findings(self, findings: Iterable[Finding], looked: Iterable[str]) -> CheckReport:
        """Returns the report with the findings of other checks, which replace findings of checks with the same name.

        Args:
            findings: findings of the other checks.
            looked: names of the checks that ran, including checks without a finding.
        """
        findings = list(findings)
        found = {one.check for one in findings}
        looked = found.union(looked)
        fine = looked - found - set(self.passed) - {one.check for one in self.findings}
        return replace(
            self,
            findings=_gravest_first([*findings, *(one for one in self.findings if one.check not in found)]),
            passed=(*sorted(fine), *(name for name in self.passed if name not in found)),
            not_done=tuple((name, reason) for name, reason in self.not_done if name not in looked),
        )

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        for one in self.findings:
            yield f"{one.severity:8}{one.check:18}{one.evidence}"
            if one.cure:
                yield f"{'':26}-> {one.cure}"
        if self.passed:
            yield f"{'fine':8}{', '.join(self.passed)}"
        for name, reason in self.not_done:
            yield f"{'not done':8} {name}: {reason}"
        for section in self.sections:
            yield ""
            yield from section.lines()
        if self.memory is not None:
            yield ""
            yield from self.memory.lines()
        if self.plan is not None:
            yield ""
            yield from self.plan.lines()
        if self.against is not None:
            yield ""
            yield from self.against.lines()

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = [(one.severity, one.check, one.evidence, one.cure) for one in self.findings]
        rows += [("fine", "", ", ".join(self.passed), "")] if self.passed else []
        rows += [("not done", name, reason, "") for name, reason in self.not_done]
        found = html_table(rows, header=("", "check", "found", "what to change"))
        plans = [plan._repr_html_() for plan in (*self.sections, self.memory, self.plan) if plan is not None]
        return html_section("Check", found, *plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """Results of the first optimizer step."""

    loss: float | None  # loss of its window, as logged; None if it was not read
    without_gradient: tuple[str, ...] = ()  # trainable parameters that the backward pass did not reach
    seconds: float | None = None  # duration; None if it is not representative of later steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFacts:
    """Facts for the checks; a check does not run if one of its facts is None (unknown)."""

    args: Arguments  # any TrainingArguments
    model: nn.Module
    device: torch.device
    processing_class: object = None
    optimizer: Optimizer | None = None
    has_own_schedule: bool = False  # the learning rates are those of a schedule of the user
    plan: StepPlan | None = None
    batches: Sequence[Batch] | None = None  # micro-batches of the first step, as the collator made them
    rows: Rows | None = None  # rows of the training data
    eval_rows: Mapping[str, Rows] | None = None  # rows of the evaluation sets by name
    tables: Sequence[Table] | None = None  # texts among the rows, before they are encoded
    # name of the transformers collator whose batches the model gets; None if user code is between the rows and the
    # model
    collator: str | None = None
    model_gets_batches: bool = False  # as the collator made them: no user hook changes them
    columns: tuple[str, ...] | None = None  # entries of a sample before unused ones are dropped
    # entries used by the model or its collator; None if nothing is dropped
    taken: frozenset[str] | None = None
    label_names: tuple[str, ...] = ()  # inputs that are labels
    can_return_loss: bool = False
    loss_is_the_models: bool = True  # no user code changes the model's loss
    step: FirstStep | None = None
    failure: str | None = None  # the error of a trial batch or step
    folder: Path | None = None  # directory of checkpoints
    checkpoint_bytes: int | None = None  # estimated size of a checkpoint
    free_bytes: int | None = None  # on the disk of `folder`
    # evaluates one batch as an evaluation would; returns the names of its metrics, or raises
    rehearse: Callable[[], Iterable[str]] | None = None
    supports_bf16: bool | None = None
    # limit for parameters to check individually; more would take too long before every run
    max_elements: int | None = None
    is_brief: bool = False  # report problems only
    found_by: frozenset[str] = frozenset()  # checks with findings so far, so that others need not repeat them


# Readable names of the facts that may be missing.
ABSENT = {
    "batches": "batch to examine",
    "step": "step that could be tried",
    "plan": "training set with a length, nor max_steps",
    "processing_class": "processing_class",
    "rehearse": "eval_dataset",
    "optimizer": "optimizer with comparable parameters",
    "columns": "sample with named entries",
    "rows": "training data with readable rows (a stream is only read in training)",
    "tables": "text among the rows, only encoded samples",
    "eval_rows": "eval_dataset with readable rows",
    "free_bytes": "way to ask the disk",
}

CHECKS: dict[str, Check] = {}
MakeSection = Callable[[CheckFacts], Section | None]
SECTIONS: list[MakeSection] = []  # of the report of a check-up


def check(*, when: Moment, needs: tuple[str, ...] = (), about: str) -> Callable[[Look], Look]:
    """Decorator: registers a function under its name."""

    def enter(look: Look) -> Look:
        name = look.__name__
        CHECKS[name] = Check(name=name, when=when, needs=needs, about=about, look=look)
        return look

    return enter


LookAtTable = Callable[[Table], Iterator[Finding]]
TABLE_CHECKS: dict[str, LookAtTable] = {}  # the checks that need only a table


def check_tables(*, about: str, when: Moment = "start") -> Callable[[LookAtTable], LookAtTable]:
    """Decorator: registers a check of a table, which examines every table of a trainer at its moment."""

    def enter(look: LookAtTable) -> LookAtTable:
        def look_at_all(facts: CheckFacts) -> Iterator[Finding]:
            for table in facts.tables or ():
                yield from look(table)

        look_at_all.__name__ = look.__name__
        check(when=when, needs=("tables",), about=about)(look_at_all)
        TABLE_CHECKS[look.__name__] = look
        return look

    return enter


def look_at_table(table: Table) -> list[Finding]:
    """Runs the checks of tables on a table that does not belong to a trainer yet."""
    return [replace(found, check=name) for name, look in TABLE_CHECKS.items() for found in look(table)]


def make_sections(facts: CheckFacts) -> tuple[Section, ...]:
    """Makes the sections of a report. One that cannot be made is left out."""
    found = []
    for make in SECTIONS:
        try:
            section = make(facts)
        except Exception as error:  # a section that fails must not end a check-up
            logger.info("A section of the report is missing: %s: %s", type(error).__name__, error)
            continue
        if section is not None:
            found.append(section)
    return tuple(found)


def look_at(facts: CheckFacts, *moments: Moment) -> CheckReport:
    """Runs the checks of these moments. A check that raises is reported as not done."""
    findings = []
    passed = []
    not_done = []
    for one in CHECKS.values():
        if one.when not in moments:
            continue
        missing = next((name for name in one.needs if getattr(facts, name) is None), None)
        if missing is not None:
            not_done.append((one.name, f"there is no {ABSENT.get(missing, missing)}"))
            continue
        try:
            found = [replace(finding, check=one.name) for finding in one.look(facts)]
        except Exception as error:  # a failing check must not end a run
            not_done.append((one.name, f"{type(error).__name__}: {error}"))
            continue
        findings += found
        if found:
            facts = replace(facts, found_by=facts.found_by | {one.name})
        passed += [] if found else [one.name]
    return CheckReport(findings=_gravest_first(findings), passed=tuple(passed), not_done=tuple(not_done))
