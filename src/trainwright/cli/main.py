"""`trainwright ...`: the commands and their exit codes. Nothing heavy is imported before one of them runs.

0    done
1    it failed while it worked, or a checkpoint is damaged, or a check found an error, or two runs differ
2    usage, configuration or data: nothing was trained
130  SIGINT (Ctrl-C); 143 SIGTERM, 138 SIGUSR1: the last finished step is saved, `trainwright resume` continues
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from trainwright import errors
from trainwright._types import counted, hide, is_url, json_value, printable, replacing, write_text
from trainwright.capability_table import COMMANDS, load
from trainwright.cli.ask import chat
from trainwright.cli.parameters import Changed, Processes
from trainwright.cli.written import check_output
from trainwright.command_line import (
    FAILED,
    AnyPlace,
    AsJson,
    amount,
    answering,
    answers_alone,
    json_text,
    named_as,
    place,
    print_json,
    print_line,
    print_status,
    print_text,
    reported,
    warn_user,
)
from trainwright.distributed.world import World
from trainwright.errors import CheckpointNotFoundError, RecipeError
from trainwright.support.log_handler import for_log
from trainwright.support.units import size_text

if TYPE_CHECKING:
    from trainwright.checkpoint.manifest import Manifest
    from trainwright.cli.recipe.schema import Recipe
    from trainwright.cli.recipe.yaml_tree import Tree
    from trainwright.cli.tasks.export_proof import ExportProof

OTHER_TABLES = (".tsv", ".xlsx", ".xls", ".parquet", ".arrow")  # files that are no JSON lines, and no CSV
WIDE = 100  # characters of a terminal that has room for times


Config = Annotated[
    Path,
    typer.Argument(help="Configuration file, as `trainwright init TASK` writes it.", metavar="CONFIG"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=VALUE", help="Override an entry: training.max_steps=100."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]


def _tasks(incomplete: str) -> list[tuple[str, str]]:
    from trainwright.cli.recipe.schema import TASKS

    return [(name, spec.title) for name, spec in TASKS.items() if name.startswith(incomplete)]


def _known_models(incomplete: str) -> list[str]:
    from trainwright.cli.recipe.known_models import read_known_models

    return [name for name in read_known_models() if name.startswith(incomplete)]


def init(
    task: Annotated[
        str,
        typer.Argument(help="Name of a task; an unknown one lists them all.", metavar="TASK", autocompletion=_tasks),
    ],
    config: Annotated[Path, typer.Argument(help="File to write.", metavar="CONFIG", dir_okay=False)] = Path(
        "config.yaml"
    ),
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For chat: train an adapter on this model, as qwen3-0.6b; an unknown name lists them all.",
            autocompletion=_known_models,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every setting, with its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration file that is ready to train."""
    from trainwright.cli.recipe.json_schema import json_schema
    from trainwright.cli.recipe.known_models import check_known_model
    from trainwright.cli.recipe.recipe_reader import SCHEMA_NAME, template
    from trainwright.cli.recipe.schema import TASKS
    from trainwright.config.vocabulary import hint_for_task

    if task not in TASKS:
        listed = "\n".join(f"    {name:<22}{spec.title}" for name, spec in TASKS.items())
        raise RecipeError(f"{task!r} is not a task.{hint_for_task(task, TASKS)} Tasks:\n{listed}")
    if like is not None:
        check_known_model(task, like)
    if config.exists() and not force:
        raise RecipeError(f"{config} already exists. Name another file, or overwrite it with --force.")
    check_output(config, option="CONFIG")
    config.parent.mkdir(parents=True, exist_ok=True)
    write_text(config, template(task, with_everything=everything, like=like))
    schema_file = config.with_name(SCHEMA_NAME)
    write_text(schema_file, json_text(json_schema()) + "\n")
    if as_json:
        print_json({"written": [config, schema_file]})
        return
    print_line(f"Written: {config}, and {schema_file} for editors. Train with\n\n    trainwright train {config}")


def train(
    context: typer.Context,
    config: Config,
    overrides: Overrides = None,
    processes: Processes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan of the run; train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train from a configuration file; evaluate and save the model."""
    from trainwright.cli.launch import launched

    recipe, tree = _read(config, overrides, context)
    if launched(recipe, processes, context):
        return
    from trainwright.cli.tasks.recipe_run import refuse_a_second_run, rehearse, run

    refuse_a_second_run(recipe, tree)
    with answering(as_json) as answer:
        if not dry_run:
            answer |= run(recipe, tree, print_status)
            return
        plan: dict[str, list[str]] = {}

        def keep(word: str, line: str) -> None:
            plan.setdefault(word, []).append(line)

        rehearse(recipe, tree, keep if as_json else print_status)
        answer["plan"] = plan


def resume(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Output directory of a run, or one of its checkpoints.", metavar="RUN")],
    overrides: Overrides = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest intact checkpoint."""
    from trainwright.cli.launch import launched
    from trainwright.cli.tasks.recipe_run import find_result, note_new_beginning, read_run
    from trainwright.cli.tasks.recipe_run import run as carry_out

    recipe, tree = read_run(run.absolute(), overrides or (), context.args)
    if (found := find_result(recipe)) is not None:
        if as_json:
            print_json(found)
            return
        more = f"trainwright extend {run} --steps N"
        if found["stopped_early"]:
            more = f"trainwright resume {run} --set training.early_stopping_patience=N (more than it had, or null)"
        print_status("finished", f"at step {found['step']}; nothing was written. Go on with: {more}")
        return
    if not launched(recipe, processes, context):
        with answering(as_json) as answer:
            note_new_beginning(recipe, print_status)
            answer |= carry_out(recipe, tree, print_status)


def extend(
    context: typer.Context,
    run: Annotated[AnyPlace, typer.Argument(help="Output directory of the run.", metavar="RUN", parser=place)],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to add to a run that has ended.", metavar="N")] = None,
    to: Annotated[int | None, typer.Option(min=1, help="Last step of the run.", metavar="STEP")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Decay the learning rate to 0: linear, cosine or 1-sqrt (default: its schedule).", metavar="SHAPE"
        ),
    ] = None,
    overrides: Changed = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run past its end; the learning rate does not jump."""
    from trainwright.cli.branch import extended
    from trainwright.cli.launch import launched
    from trainwright.cli.tasks.recipe_run import run as carry_out

    recipe, tree = extended(run, steps=steps, to=to, shape=shape, overrides=overrides or (), typed=context.args)
    if not launched(recipe, processes, context):
        with answering(as_json) as answer:
            answer |= carry_out(recipe, tree, print_status)


def _read(config: Path, overrides: list[str] | None, context: typer.Context) -> tuple[Recipe, Tree]:
    """Reads a configuration file; one error lists all mistakes, in the file, in the options and in the data."""
    from trainwright.cli.recipe.recipe_reader import checked, read_tree
    from trainwright.cli.user_code import allow_functions

    def in_data(recipe: Recipe, tree: Tree) -> list[tuple[tuple[str, ...], str]]:
        from trainwright.cli.tasks.source import find_data_problems  # loads torch

        allow_functions(tree, config.absolute().parent)
        return find_data_problems(recipe, tree)

    _check_there(config)
    tree = read_tree(config, overrides or (), context.args, also=in_data)
    allow_functions(tree, config.absolute().parent)
    return checked(tree, config.absolute().parent, also=in_data), tree


def _check_there(config: Path) -> None:
    """Raises RecipeError if there is no such configuration file."""
    if config.is_dir():
        raise RecipeError(
            f"{config} is a directory. Name its configuration file; `trainwright resume {config}` continues a run."
        )
    if not config.exists():
        there = [one.name for one in config.parent.iterdir()] if config.parent.is_dir() else []
        hint = errors.did_you_mean(config.name, there)
        raise RecipeError(f"There is no file {config}.{hint} `trainwright init TASK` writes one.")


def check(
    context: typer.Context,
    config: Config,
    overrides: Overrides = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also estimate the memory of a step.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Also prove that a resume is exact.")] = False,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory limit, such as 24GB.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Also plan a run of N processes.", metavar="N")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Processes per machine.", metavar="N")] = None,
    engine: Annotated[
        str | None, typer.Option(help="How they share the model; an unknown name lists all.", metavar="ENGINE")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="PACKAGES", help="Compare versions, as transformers==5.24.0.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for problems without training."""
    recipe, tree = _read(config, overrides, context)
    from trainwright.cli.tasks.recipe_run import make_trainer, removes_unused_directory
    from trainwright.preflight.check_registry import TABLE_CHECKS, CheckReport
    from trainwright.support.findings import Finding

    shares: str | Mapping[str, Any] | None = engine
    if processes is not None:
        from trainwright.config.plan_words import split_engine

        training, asked = split_engine(recipe.training)
        recipe = dataclasses.replace(recipe, training=training)
        shares = engine or asked
    about: dict[str, list[str]] = {}

    def keep(word: str, line: str) -> None:
        about.setdefault(word, []).append(line)

    found: list[Finding] = []
    proof = None
    with removes_unused_directory(Path(recipe.training["output_dir"])):
        try:
            trainer = make_trainer(recipe, tree, keep if as_json else print_status, found=found)
        except RecipeError:
            if not any(finding.severity == "error" for finding in found):
                raise
            report = CheckReport(not_done=(("others", "the rows have errors, so that no model was loaded"),))
        else:
            report = trainer.check(
                memory=memory or budget is not None,
                budget=budget,
                processes=processes,
                per_node=per_node,
                engine=shares,
                against=against,
            )
            proof = trainer.prove() if prove and report.worst != "error" else None
    report = report.with_findings(found, TABLE_CHECKS)
    if as_json:
        proved = None if proof is None else str(proof)
        print_json({**about, **dataclasses.asdict(report), "worst": report.worst, "proof": proved})
    else:
        print_line(str(report) if proof is None else f"{report}\n\n{proof}")
    is_apart = report.against is not None and not report.against.is_same
    if report.worst == "error" or is_apart or (proof is not None and not proof.holds):
        raise typer.Exit(FAILED)


def report(
    run: Annotated[
        AnyPlace,
        typer.Argument(
            help="Output directory or URL of a run or a search, or a journal.jsonl.", metavar="RUN", parser=place
        ),
    ],
    output: Output = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep the page up to date until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML file that shows a run or a search."""
    from trainwright.report.run_page import write_report

    if output is not None:
        check_output(output, [run], option="--output")
    if is_url(run):
        from trainwright.cli.remote_runs import fetch_journal

        if watch:
            raise errors.ArgumentError(f"--watch follows a run in a directory, and {run} is a URL.")
        with fetch_journal(run) as folder:
            _say_written(write_report(folder, output or Path("report.html")), as_json=as_json)
        return
    _say_written(write_report(run, output), as_json=as_json)
    if watch:
        print_line("The open page is kept up to date until the run ends; Ctrl-C stops this.", err=as_json)
        write_report(run, output, watch=True)


def _say_written(path: Path, *, as_json: bool, **facts: object) -> None:
    """Names a file that was written, and facts about it in JSON."""
    if as_json:
        print_json({"written": [path], **facts})
    else:
        print_line(f"Written: {path}")


def compare(
    runs: Annotated[
        list[AnyPlace],
        typer.Argument(help="Output directories or URLs of two or more runs.", metavar="RUN", parser=place),
    ],
    tolerance: Annotated[
        float, typer.Option(parser=amount, metavar="NUMBER", help="Relative difference of losses to ignore.")
    ] = 1e-6,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML file that shows where runs diverge, and why."""
    from trainwright.report.comparison import comparison, first_difference, partings, read_runs
    from trainwright.report.run_table import (
        OTHER_ROWS,
        collect_metrics,
        differing_arguments,
        find_best,
        is_comparable,
        list_origins,
        metric_texts,
        origin_text,
    )

    if len(runs) < 2:
        raise errors.ArgumentError(
            f"compare takes two runs or more, and {runs[0]} is one: trainwright compare {runs[0]} OTHER_RUN. "
            f"`trainwright runs` lists the runs below a directory; `trainwright report {runs[0]}` shows one."
        )
    from trainwright.cli.remote_runs import fetch_journal

    path = output or Path("comparison.html")
    check_output(path, runs, option="--output")
    with ExitStack() as stack:
        records = read_runs([stack.enter_context(fetch_journal(run)) for run in runs])
    pairs = partings(records, tolerance)
    first = first_difference(records, tolerance)
    origins = {name: list_origins(record) for name, record in records.items()}
    if as_json:
        found = {
            "parts_at_step": first,
            "pairs": [dataclasses.asdict(pair) for pair in pairs],
            "origins": origins,
        }
        same = {"comparable_metrics": is_comparable(records), "arguments": differing_arguments(records)}
        print_json({"runs": list(records), **found, **same})
        return
    for name, record in records.items():
        print_line(f"{name}: {', '.join(metric_texts(collect_metrics(record, find_best(record)))) or 'no evaluation'}")
        for origin in origins[name][-1:]:
            print_line(f"{name} is a branch of {origin_text(origin)}")
    if not is_comparable(records):
        print_line(OTHER_ROWS)
    for name, values in differing_arguments(records).items():
        print_line(f"{name}: {' | '.join(map(str, values))}")
    for pair in pairs:
        print_line(f"{' and '.join(pair.runs)}: {pair}")
    write_text(path, comparison(records, tolerance=tolerance))
    print_line(f"Written: {path}")


def runs(
    folder: Annotated[AnyPlace, typer.Argument(help="Directory or URL to search.", metavar="DIR", parser=place)] = ".",
    as_json: AsJson = False,
) -> None:
    """Show the runs below a directory: metrics, arguments, state."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from trainwright.cli.remote_runs import journals_below
    from trainwright.report.run_table import ago, argument_texts, find_runs, metric_texts, origin_text, readable_time

    with journals_below(folder) as local:
        found = find_runs(local)
    now = time.time()
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    if not found:
        print_line(f"No run is below {folder}: none has a journal.jsonl.")
        return
    console = Console()
    names = ["run", "best evaluation", "differs in", "state", "step", "time", "written"]
    if console.width < WIDE:
        del names[-2:]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        justify: Any = "right" if name in ("step", "time") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("run", "differs in"))
    for one in found:
        described = [
            "\n".join(map(printable, texts))
            for texts in ([*metric_texts(one.metrics), *one.findings], argument_texts(one.arguments))
        ]
        named = "\n".join([one.name, *(f"of {origin_text(origin)}" for origin in one.origins[-1:])])
        cells = (named, one.state, one.steps, readable_time(one.seconds), ago(one.written_at, now))
        name, *progress = ("\n".join(map(printable, cell.split("\n"))) for cell in cells)
        table.add_row(*map(Text, (name, *described, *progress)[: len(names)]))
    console.print(table)


def push(
    run: Annotated[Path, typer.Argument(help="Output directory of a run.", metavar="RUN")],
    token: Annotated[str | None, typer.Option(help="Token for the Hub (default: your login's).")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload the files that a run with push_to_hub could not send."""
    from trainwright.hub.access import account_problem
    from trainwright.hub.outbox import Outbox
    from trainwright.hub.uploader import Uploader

    hide(token)
    waiting = Outbox(run).waiting()
    if not waiting:
        if as_json:
            print_json({"uploads": []})
            return
        print_line(f"Nothing waits in {run}: all of it is on the Hub, or it was trained without push_to_hub.")
        return
    if problem := account_problem(token):
        warn_user(f"Nothing was uploaded: {problem} The files stay in {waiting[0].folder.parent}.")
        raise typer.Exit(FAILED)
    failed = Uploader(run, run.resolve().name, token=token).finish()
    uploads = []
    for upload in waiting:
        ticket = upload.ticket
        where = "/".join(part for part in (ticket.repo or run.resolve().name, ticket.path) if part)
        uploads.append({"to": where, "step": ticket.step, "message": ticket.message, "is_done": upload not in failed})
        if not as_json:
            state = "Not uploaded" if upload in failed else "Uploaded"
            print_line(f"{state}: {ticket.message or 'files'} (step {ticket.step}) to {where}")
    if as_json:
        print_json({"uploads": uploads})
    if failed:
        raise typer.Exit(FAILED)


def schema(output: Output = None, as_json: AsJson = False) -> None:
    """Write the JSON schema of the configuration file, for editors."""
    from trainwright.cli.recipe.json_schema import json_schema

    text = json_text(json_schema())
    if output is None:
        print_text(text)  # no value of a user is in it, and names of fields are not to be masked
    else:
        check_output(output, option="--output")
        write_text(output, f"{text}\n")
        _say_written(output, as_json=as_json)


def export(
    checkpoint: Annotated[
        AnyPlace, typer.Argument(help="Run or checkpoint; a path or a URL.", metavar="RUN", parser=place)
    ],
    folder: Annotated[Path, typer.Argument(help="Directory to write, new or empty.", metavar="DIR")],
    merged: Annotated[bool, typer.Option("--merge", help="Merge the adapter (lora) into the model.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights: fp32, bf16 or fp16.", metavar="TYPE")] = None,
    to: Annotated[str | None, typer.Option(help="gguf: also write a file for llama.cpp.", metavar="FORM")] = None,
    weights: Annotated[str, typer.Option(help="Which weights: trained or average.", metavar="KIND")] = "trained",
    prove: Annotated[
        str | None, typer.Option(help="Compare with the trained model, on FILE or held-out rows.", metavar="[FILE]")
    ] = None,
    accepts: Annotated[bool, typer.Option("--accept-differences", help="Write the model even if it differs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write only the model of a checkpoint, for from_pretrained."""
    from trainwright.cli.tasks.export import DTYPES

    if weights not in ("trained", "average"):
        raise errors.ArgumentError(f"--weights {weights}: write trained or average.")
    if merged and weights == "average":
        raise errors.ArgumentError("--merge takes trained weights: export the average first, then that with --merge.")
    if dtype is not None and dtype not in DTYPES:
        raise errors.ArgumentError(f"--dtype {dtype}: write {', '.join(DTYPES)}.")
    if to not in (None, "gguf"):
        raise errors.ArgumentError(f"--to {to}: write gguf, or omit it for a directory that from_pretrained loads.")
    if accepts and prove is None:
        raise errors.ArgumentError("--accept-differences is for --prove, which finds them.")
    if prove and not Path(prove).exists():
        raise errors.DataError(f"There is no file {prove} to prove the export on.")
    from trainwright.cli.remote_runs import fetch_checkpoint
    from trainwright.cli.tasks.export import chosen, chosen_checkpoint, has_adapter
    from trainwright.cli.tasks.export_folder import Export, write_export

    with fetch_checkpoint(checkpoint) as local:
        source, why = chosen_checkpoint(local) if weights == "average" else chosen(local)
        if why:
            print_line(f"From {source.name if is_url(checkpoint) else source}: {why}", err=as_json)
        is_merged = merged and has_adapter(source)
        if merged and not is_merged and source.is_dir():
            warn_user(f"--merge has no effect: {source} has no adapter. Its weights are written as they are.")
        if to == "gguf" and not merged and has_adapter(source):
            raise errors.ArgumentError("--to gguf takes a whole model, and this is an adapter. Add --merge.")
        asked = Export(
            source=source,
            run=local,
            folder=folder,
            is_merged=is_merged,
            dtype=dtype,
            weights=weights,
            is_proved=prove is not None,
            rows=Path(prove) if prove else None,
            accepts=accepts,
        )
        proof = write_export(asked)
    _say_exported(folder, proof, to=to, as_json=as_json)


def _say_exported(folder: Path, proof: ExportProof | None, *, to: str | None, as_json: bool) -> None:
    """Reports an export, and makes the file in another form of it."""
    is_written = proof is None or proof.holds or proof.is_accepted
    answer: dict[str, Any] = {"written": [], "bytes": 0}
    for word, line in () if proof is None or as_json else proof.lines():
        print_status(word, line)
    if proof is not None:
        answer["proof"] = proof.to_dict()
    if not is_written:
        assert proof is not None
        if as_json:
            print_json(answer)
        warn_user(proof.refusal(folder))
        raise typer.Exit(FAILED)
    converted = None
    if to == "gguf":
        from trainwright.cli.tasks.gguf import convert_to_gguf

        converted = convert_to_gguf(folder)
        answer["gguf"] = dataclasses.asdict(converted)
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in written)
    answer |= {"written": written, "bytes": size}
    if as_json:
        print_json(answer)
    else:
        print_line(f"Written: {folder}, {counted(len(written), 'file')}, {size_text(size)}")
    if converted is None:
        return
    if not converted.is_done:
        warn_user(f"No GGUF file was written: llama.cpp's converter is not on the PATH. Run\n\n    {converted.command}")
        raise typer.Exit(FAILED)
    if not as_json:
        print_line(f"Converted by llama.cpp: {converted.file}. Its numbers were not compared with the model's.")


def verify(
    checkpoint: Annotated[
        AnyPlace,
        typer.Argument(
            help="A checkpoint; or a run, for all its checkpoints; a path or a URL.", metavar="CHECKPOINT", parser=place
        ),
    ],
    accepts: Annotated[bool, typer.Option("--accept", help="Accept files that you changed on purpose.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that the files of a checkpoint are complete and unchanged."""
    from trainwright.checkpoint.checkpoint import Checkpoint
    from trainwright.checkpoint.store import CheckpointStore
    from trainwright.journal.record import JOURNAL_NAME

    if is_url(checkpoint):
        if accepts:
            raise errors.ArgumentError("--accept takes a checkpoint in a directory: what is at a URL is not changed.")
        _verify_under(checkpoint, as_json=as_json)
        return
    store = CheckpointStore(checkpoint)
    folders = [store.path(step) for step in store.steps()] or [checkpoint]
    if not checkpoint.is_dir():
        raise CheckpointNotFoundError(f"There is no directory {checkpoint}.")
    if folders == [checkpoint] and (checkpoint / JOURNAL_NAME).is_file():
        raise CheckpointNotFoundError(f"The run in {checkpoint} has no checkpoint yet.")
    if accepts:
        _accept(folders, as_json=as_json)
        return
    problems: dict[Path, list[str]] = {}
    for folder in folders:
        opened = Checkpoint(folder)
        problems[folder] = list(opened.problems())
        if not as_json:
            print_line(f"{folder}: {'damaged' if problems[folder] else intact(opened.manifest)}")
            for problem in problems[folder]:
                print_line(f"    {problem}")
    if as_json:
        print_json([{"checkpoint": folder, "problems": found} for folder, found in problems.items()])
    if any(problems.values()):
        raise typer.Exit(FAILED)


def _verify_under(url: str, *, as_json: bool) -> None:
    from trainwright.cli.remote_runs import verified_under

    found: dict[str, list[str]] = {}
    for name, manifest, problems in verified_under(url):
        found[name] = problems
        if not as_json:
            print_line(f"{name}: {'damaged' if problems or manifest is None else intact(manifest)}")
            for problem in problems:
                print_line(f"    {problem}")
    if as_json:
        print_json([{"checkpoint": name, "problems": problems} for name, problems in found.items()])
    if any(found.values()):
        raise typer.Exit(FAILED)


def _accept(folders: list[Path], *, as_json: bool) -> None:
    from trainwright.checkpoint.checkpoint import Checkpoint
    from trainwright.cli.verify import accepted
    from trainwright.run.resume import find_unreadable

    results = accepted(folders)
    if as_json:
        print_json([{"checkpoint": folder, "accepted": found} for folder, found in results.items()])
        return
    for folder, found in results.items():
        checkpoint = Checkpoint(folder)
        print_line(f"{folder}: {intact(checkpoint.manifest)}")
        for name, kind in found.items():
            print_line(f"    {name} was {kind}, and is accepted")
        if problem := find_unreadable(checkpoint):
            print_line(f"    no run can resume from it: {problem}")


def intact(manifest: Manifest | None) -> str:
    """Returns a line about a checkpoint without a problem; `manifest` is None for a checkpoint of transformers."""
    if manifest is None:
        return "complete; it has no manifest, so its files could not be compared"
    size = sum(entry["size"] for entry in manifest.files.values())
    mark = "" if manifest.non_finite_mark is None else f"; a resume skips it, since {manifest.non_finite_mark}"
    return f"intact, step {manifest.step}, {counted(len(manifest.files), 'file')}, {size_text(size)}{mark}"


Model = Annotated[
    AnyPlace, typer.Argument(help="A run, a checkpoint, or a model; a path or a URL.", metavar="MODEL", parser=place)
]
Task = Annotated[str | None, typer.Option(help="Task, if MODEL is not a run.", metavar="TASK", autocompletion=_tasks)]
WhichWeights = Annotated[str, typer.Option(help="Which weights: trained or average.", metavar="KIND")]


def eval(
    model: Model,
    data: Annotated[Path, typer.Option(help="File with rows and their labels.")],
    overrides: Overrides = None,
    task: Task = None,
    weights: WhichWeights = "trained",
    hardest: Annotated[int, typer.Option(min=0, help="Show the N rows with the largest losses.", metavar="N")] = 10,
    watch: Annotated[bool, typer.Option("--watch", help="Evaluate for a live run with eval_async=watch.")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on other data."""
    from trainwright.cli.remote_runs import fetch_checkpoint
    from trainwright.cli.tasks.applied import applied, rows_at
    from trainwright.cli.tasks.evaluate import evaluate
    from trainwright.cli.tasks.recipe_run import readable
    from trainwright.report.evaluation_page import evaluation_page

    if watch:
        _watch(model, data, overrides=overrides or (), task=task, as_json=as_json)
        return
    path = output or Path("evaluation.html")
    check_output(path, [data, model], option="--output")
    with (
        rows_at(data) as file,
        fetch_checkpoint(model) as local,
        applied(local, file, task=task, overrides=overrides or (), weights=weights) as one,
    ):
        if one.note:
            print_line(f"From {named_as(model, local, one.note)}", err=True)
        found = evaluate(one, num_hardest=hardest)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    scores = readable({f"eval_{name}": value for name, value in found.metrics.items()})
    print_line(f"{counted(found.num_samples, 'sample')}: {scores}")
    for row in found.hardest:
        pair = f" {row['right']} -> {row['predicted']}" if "right" in row else ""
        print_line(f"{row['loss']:8.4g}  {row['name']}{pair}  {row['text']}")
    about = {name: value for name, value in dataclasses.asdict(found).items() if name not in ("task", "num_samples")}
    note = f"{found.task}, {counted(found.num_samples, 'sample')} of {data}"
    write_text(path, evaluation_page(title=f"Evaluation of {model}", note=note, **about))
    print_line(f"Written: {path}")


def _watch(run: Path, data: Path, *, overrides: Sequence[str], task: str | None, as_json: bool) -> None:
    """Makes the evaluations that a run asks for, until it ends."""
    from trainwright.capabilities.async_evaluation.requests import EvaluationRequest
    from trainwright.capabilities.async_evaluation.watcher import Watcher
    from trainwright.cli.tasks.applied import applied, rows_at
    from trainwright.cli.tasks.evaluate import evaluate
    from trainwright.cli.tasks.recipe_run import readable

    def warn_user(request: EvaluationRequest, metrics: dict[str, Any]) -> None:
        if as_json:
            print_text(for_log(json.dumps(json_value({"step": request.step, **metrics}))))
        else:
            print_line(f"Step {request.step}: {readable(metrics)}")

    with rows_at(data) as file:

        def evaluate_folder(model: Path) -> dict[str, float]:
            with applied(model, file, task=task, overrides=overrides, run=run) as one:
                return evaluate(one, num_hardest=0).metrics

        number = Watcher(run, evaluate_folder).watch(warn_user)
    if not as_json:
        print_line(f"The run has ended; made here: {counted(number, 'evaluation')}")


def predict(
    model: Model,
    data: Annotated[Path, typer.Option(help="File with rows (-: stdin).", show_default=False)] = Path("-"),
    out: Annotated[
        Path,
        typer.Option("--output", "-o", "--out", help="JSON lines or .csv to write (-: stdout).", show_default=False),
    ] = Path("-"),
    overrides: Overrides = None,
    task: Task = None,
    weights: WhichWeights = "trained",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per batch.", metavar="N")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of a generated text, in tokens.", metavar="N")] = 64,
    as_json: AsJson = False,
) -> None:
    """Write the predictions of a trained model, row by row."""
    from trainwright.cli.remote_runs import fetch_checkpoint
    from trainwright.cli.tasks.applied import applied, rows_at
    from trainwright.cli.tasks.predict import predict, predict_rows, write_table

    if str(out) != "-":
        check_output(out, [data, model], option="--output")
    if out.suffix.lower() in OTHER_TABLES:
        raise errors.ArgumentError(f"--output {out}: predictions are written as .jsonl or .csv, not {out.suffix}.")
    with (
        answers_alone(),
        rows_at(data) as file,
        fetch_checkpoint(model) as local,
        applied(local, file, task=task, overrides=overrides or (), weights=weights) as one,
    ):
        if one.note:
            print_line(f"From {named_as(model, local, one.note)}", err=True)
        if out.suffix.lower() == ".csv":
            with replacing(out) as partial, partial.open("w", encoding="utf-8", newline="") as target:
                number = write_table(target, predict_rows(one, batch_size, max_new_tokens))
            _say_predicted(out, number, as_json=as_json)
            return
        found = (
            json.dumps(json_value(row), ensure_ascii=False)
            for row in predict(one, batch_size=batch_size, max_new_tokens=max_new_tokens)
        )
        if str(out) == "-":
            for line in found:
                print_text(printable(line))
            return
        number = 0
        with replacing(out) as partial, partial.open("w", encoding="utf-8") as target:
            for line in found:
                target.write(f"{line}\n")
                number += 1
    _say_predicted(out, number, as_json=as_json)


def _say_predicted(out: Path, number: int, *, as_json: bool) -> None:
    if as_json:
        _say_written(out, as_json=True, rows=number)
        return
    print_line(f"Written: {out}, {counted(number, 'row')}")


def env(as_json: AsJson = False) -> None:
    """Show versions and hardware, for a bug report."""
    from trainwright.journal.record import environment

    found = environment(World.detect().device)
    found.pop("script")
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    found["memory_bytes"] = size_text(found["memory_bytes"])
    rows = {**packages, **{name.removesuffix("_bytes"): value for name, value in found.items()}}
    for name, value in rows.items():
        if value is not None:
            print_line(f"{name:<14}{value}")


def mcp(
    folder: Annotated[
        Path, typer.Argument(help="Folder that the tools may not leave.", metavar="DIR", exists=True, file_okay=False)
    ] = Path("."),
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Also write files, start and control runs, and push.")
    ] = False,
) -> None:
    """Offer the commands as tools to a coding agent (MCP, over stdio)."""
    from trainwright.cli.mcp_server import serve

    group: Any = typer.main.get_command(app)
    commands = {name: command for name, command in group.commands.items() if name != "mcp"}
    serve(commands, folder, allows_writes=allow_writes)


class OneScreen(typer.core.TyperGroup):
    """Group of commands with help that fits on a screen: its own options are not listed."""

    def get_params(self, ctx: Any) -> list[Any]:  # classes of click, which some versions of typer bring along
        """Returns the options of the program itself."""
        params = super().get_params(ctx)
        for one in params:
            if one.name in ("show_completion", "install_completion", "version", "help"):
                setattr(one, "hidden", True)  # noqa: B010 -- an option has it, other parameters do not
        return params


class ProveWithoutFile(typer.core.TyperCommand):
    """A command whose option `--prove` may have no value, which is then the empty text."""

    def make_parser(self, ctx: Any) -> Any:  # classes of click, as above
        """Returns the parser of the command's words."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            words = list(args)
            for at, word in enumerate(words):
                if word == "--":
                    break
                following = words[at + 1] if at + 1 < len(words) else "-"
                if word == "--prove" and following.startswith("-"):
                    words[at] = "--prove="
            return parse(words)

        setattr(parser, "parse_args", parse_args)  # noqa: B010 -- a method is not assigned to
        return parser


app = typer.Typer(
    cls=OneScreen,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its tracebacks show the values of variables, tokens among them
    context_settings={"help_option_names": ["-h", "--help"]},
)
AS_TYPED = {"allow_extra_args": True, "ignore_unknown_options": True}  # --learning_rate 1e-4 training.max_steps=1
OWN = (
    init,
    check,
    train,
    resume,
    extend,
    runs,
    report,
    compare,
    verify,
    export,
    chat,
    eval,
    predict,
    push,
    schema,
    env,
)
TAKES_SETTINGS = ("check", "train", "resume", "extend")


def add_commands() -> None:
    """Adds the commands of the program, and after the one that its row names each command of a capability, by name."""
    entries = sorted(COMMANDS, key=lambda entry: entry.name)
    for own in OWN:
        kind = ProveWithoutFile if own is export else None
        settings = AS_TYPED if own.__name__ in TAKES_SETTINGS else None
        app.command(cls=kind, context_settings=settings)(reported(own))
        for entry in entries:
            if entry.after == own.__name__:
                settings = AS_TYPED if entry.takes_settings else None
                app.command(context_settings=settings)(reported(load(entry.function)))


add_commands()
app.command()(reported(mcp))


def _version(is_asked: bool) -> None:
    if is_asked:
        from trainwright import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    # No docstring: typer would show it, and the help would no longer fit a screen of 24 lines.
    pass


if __name__ == "__main__":
    app()
