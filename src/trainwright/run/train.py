"""The course of a run, from the checkpoint that it resumes from to the last file; the hooks are the trainer's.

training            wraps everything: the run, its extensions, signals, the model, the files at the end
prepare_model     the model, with the weights of a checkpoint
begin_training    before the first step
plan_run        data and steps
prepare_run     record, position, optimizer, extensions
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from trainwright.capability import Moment, RunContext
from trainwright.checkpoint import training_state
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.config import resolve
from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.errors import ArgumentError
from trainwright.evaluation.outputs import TrainOutput
from trainwright.loop.fit import epochs, saving_last_step
from trainwright.loop.step import Step
from trainwright.run import build, checkpointing, checks, console, loss_rules, resume
from trainwright.run.current import using_run
from trainwright.run.internals import Internals
from trainwright.run.patched_model import patched
from trainwright.run.refusal import unchanged_before_training
from trainwright.run.run import Run
from trainwright.run.run_callbacks import run_callbacks
from trainwright.state.interrupts import Interrupted
from trainwright.support.hooks import accept_older_signatures, has_hook, is_overridden
from trainwright.support.model_facts import core_model, uncompiled
from trainwright.support.optimizer_facts import trained_parameters
from trainwright.support.replaced import current

AnyTrainer: TypeAlias = Any  # a Trainer, or a subclass of the user's: the class is above this package

logger = logging.getLogger(__name__)


@contextmanager
def training(trainer: AnyTrainer, resume_from_checkpoint: str | bool | None, trial: Any) -> Iterator[Checkpoint | None]:
    """Wraps a whole training: its run, its claim on the directory, signals, the model; writes all files at the end.

    Yields the checkpoint that it resumes from, with its weights already loaded; None for a fresh run.
    """
    internals = Internals(trainer)
    internals.run.check_not_training()
    accept_older_signatures(trainer)
    trainer._hp_search_setup(trial)
    args = trainer.args
    engine = internals.engine
    services = internals.services
    run = Run.after(internals.run, args, trial)
    services.use_clock(run.progress.clock)
    refused = unchanged_before_training(run)
    wanted = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
    if wanted is None and getattr(args, "overwrite_output_dir", None):
        wanted = False  # a branch starts afresh
    folder = trainer._get_output_dir(trial)
    together = engine.together(run.progress.interrupts)
    measuring = services.memory_tracker.measuring("train")
    context = make_context(trainer, run, folder)
    run.extensions.add(*build.make_extensions(Moment.DIRECTORY, context), *internals.extensions)
    listening_journal = services.journal.listening()
    with refused, using_run(trainer, run), listening_journal, run.with_extensions(), together, measuring:
        checkpoint = run.resumed.checkpoint = resume.open_checkpoint(wanted, args, engine)
        resume.check_cooldown(checkpoint, args)
        origin = resume.find_origin(args)
        begins = checkpoint is not None and origin is not None and origin.is_begun_by(checkpoint)
        run.resumed.begins_branch = begins
        checkpointing.prepare_output(args, folder, is_fresh=checkpoint is None or begins)
        if checkpoint is not None and origin is not None and begins and args.should_save:
            origin.bring_along(checkpoint, output_path(args))
        with run_callbacks(trainer.callback_handler, args, folder), run.under_way(services):
            prepare_model(trainer, trial, checkpoint)
            for model_ready in run.extensions.model_ready:
                model_ready(run)
            listening = run.progress.listening(grace_s=get_value(args, "signal_grace_s"))
            with patched_model(trainer), listening, leaving_before_first_step(run):
                yield checkpoint
                services.writer.end()
            run.progress.interrupts.leave()  # a signal that came after all was trained, which is on disk too


@contextmanager
def leaving_before_first_step(run: Run) -> Iterator[None]:
    """Ends the process as a signal asks that comes while a run waits before its first step."""
    try:
        yield
    except Interrupted:
        name = signal.Signals(run.progress.interrupts.received or 0).name
        logger.warning("Interrupted by %s before the first step.", name)
        run.progress.interrupts.leave()
        raise


def make_context(trainer: AnyTrainer, run: Run, folder: str) -> RunContext:
    """Returns what the capabilities of a run may make their extensions from; `folder` is its output directory."""
    internals = Internals(trainer)

    def freeze(path: Path, **how: Any) -> None:
        from trainwright.run import frozen

        frozen.freeze(trainer, path, folder=folder, **how)

    return RunContext(
        run=run,
        hooks=trainer,
        engine=internals.engine,
        folder=folder,
        load_newest=lambda: internals.checkpointer.load_newest(trainer, folder, run),
        show=lambda line: console.show_lines(trainer.args, [line]),
        freeze=freeze,
        rotate=lambda: checkpointing.rotate_anew(folder, trainer.args, run),
    )


def drive(
    trainer: AnyTrainer, resume_from_checkpoint: str | bool | None, ignore_keys_for_eval: list[str] | None
) -> Generator[Step, None, TrainOutput]:
    """Runs the loop of `train()` without its body: yields the steps, and returns the result of `train()`."""
    with training(trainer, resume_from_checkpoint, None) as checkpoint:
        begin_training(trainer, trainer.args, checkpoint, None, ignore_keys_for_eval)
        internals = Internals(trainer)
        run = internals.run
        with saving_last_step(run, trainer):
            for epoch in epochs(run, trainer, eval_on_start=trainer.args.eval_on_start):
                yield from internals.iterate_steps(epoch)
        output: TrainOutput = trainer._finalize_training(None, run.plan.num_train_samples, run.progress.beginning.time)
        return output


# -- the model ---------------------------------------------------------------------------------------------------------


def prepare_model(trainer: AnyTrainer, trial: Any, checkpoint: Checkpoint | None) -> None:
    """Prepares the model of a run, with the weights of its checkpoint."""
    renew_model(trainer, trial)
    follow_model(trainer)
    internals = Internals(trainer)
    internals.services.adoption.drop_stale(trainer, internals.engine)
    if trainer.processing_class is not None:
        from trainwright.support.patches import align_special_tokens

        current("align_special_tokens", align_special_tokens)(trainer.model, trainer.processing_class)
    if checkpoint is not None:
        trainer._load_from_checkpoint(str(checkpoint))
        internals.checkpointer.check_finite(trainer.model, checkpoint)
        trainer._train_batch_size = resume.choose_batch_size(checkpoint, trainer.args, trainer._train_batch_size)
    checks.check_trainable(trainer.model, getattr(trainer.args, "mixed_precision", "no"))


def renew_model(trainer: AnyTrainer, trial: Any) -> None:
    """Makes a new model if the trainer has a `model_init`, and removes the optimizer of the old one."""
    if trainer.model_init is None:
        return
    build.seed_everything(trainer.args)
    internals = Internals(trainer)
    internals.adopt_model(trainer.call_model_init(trial))
    trainer.optimizer = None
    trainer.lr_scheduler = None
    if internals.is_searching:
        trainer.label_smoother = loss_rules.label_smoother(trainer.model, trainer.args.label_smoothing_factor)


def follow_model(trainer: AnyTrainer) -> None:
    """Takes over a model that was assigned to `trainer.model` since the last call, with all that is derived from it."""
    internals = Internals(trainer)
    adoption = internals.services.adoption
    model = trainer.model
    if adoption.is_adopted(model) or internals.run.has_begun:
        return
    derived = adoption.derive_again(trainer, model)
    if derived is not None:
        internals.follow_loss_kwargs(derived.model_accepts_loss_kwargs)
    internals.adopt_model(model)
    internals.services.eval_dataloaders.clear()
    trainer.callback_handler.model = model


def check_replaced(trainer: AnyTrainer) -> None:
    """Raises ArgumentError if a callback has replaced the model or the optimizer so that nothing would be trained."""
    internals = Internals(trainer)
    engine = internals.engine
    setup = internals.run.setup
    optimizer = trainer.optimizer
    if optimizer is not setup.optimizer:
        checks.check_optimizer(optimizer, engine.updated_tensors(optimizer), engine.unwrap(setup.model), setup.model)
    if internals.services.adoption.is_adopted(trainer.model):
        return
    trained = {*map(id, trained_parameters([engine.unwrap(setup.model), setup.model]))}
    assigned = trained_parameters([trainer.model])
    if assigned and not trained & {*map(id, assigned)}:
        raise ArgumentError(
            "trainer.model was replaced after training began, so the run would train the model that it began with and "
            "save the other one. Assign trainer.model before train()."
        )


def patched_model(trainer: AnyTrainer) -> AbstractContextManager[None]:
    """Returns a context in which the model has the changes that the arguments ask for in training."""
    internals = Internals(trainer)
    return patched(
        trainer.args,
        trainer.model,
        internals.engine,
        keeps_outputs=internals.uses_outputs(),
        noise=noise_on_embeddings(trainer),
    )


@contextmanager
def noise_on_embeddings(trainer: AnyTrainer) -> Iterator[None]:
    """Adds noise to the embeddings in a run with `neftune_noise_alpha`."""
    if trainer.neftune_noise_alpha is None:
        yield
        return
    trainer._activate_neftune(trainer.model)
    try:
        yield
    finally:
        trainer._deactivate_neftune(trainer.model)


# -- before the first step ---------------------------------------------------------------------------------------------


def begin_training(
    trainer: AnyTrainer, args: Any, checkpoint: Checkpoint | None, trial: Any, ignore_keys: list[str] | None
) -> None:
    """Does everything before a run's first step; afterwards `run.setup` and `run.plan` exist."""
    internals = Internals(trainer)
    run = internals.run
    engine = internals.engine
    services = internals.services
    plan_run(trainer, args, checkpoint)
    prepare_run(trainer, args, checkpoint, trial, ignore_keys)
    folder = trainer._get_output_dir(trial)
    engine.agree(lambda: checkpointing.check_first_checkpoint(args, folder, trainer.model))
    console.log_run_header(
        run,
        args,
        trainer.state,
        engine,
        note=run.resumed.note,
        loss_note=loss_rules.loss_note(trainer.model, args, run),
        changed_args=run.resumed.changes,
        begins_branch=run.resumed.begins_branch,
        has_own_optimizer=has_own_optimizer(trainer),
        has_own_schedule=build.has_own_schedule(trainer),
    )
    if check_evaluation(trainer, ignore_keys):
        console.show_lines(args, [CHECKED_METRICS])
    console.begin_journal(
        services.journal,
        run,
        args,
        folder=folder,
        run_id=run.run_id,
        model=trainer.model,
        train=trainer.train_dataset,
        eval=trainer.eval_dataset,
    )
    if trainer.args.push_to_hub:
        internals.open_repository()
    services.uploads.take_up()
    run.has_begun = True


def has_own_optimizer(trainer: AnyTrainer) -> bool:
    """Returns whether a trainer's optimizer need not be the one that its arguments name."""
    hooks = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
    makes_another = is_overridden(trainer, *hooks)
    is_made = Internals(trainer).services.adoption.has_made(trainer.optimizer)
    return makes_another or not is_made or trainer.optimizer_cls_and_kwargs is not None


def plan_run(trainer: AnyTrainer, args: Any, checkpoint: Checkpoint | None) -> None:
    """Reads the data and counts the steps; for a resume, the remaining steps."""
    internals = Internals(trainer)
    run = internals.run
    engine = internals.engine
    checks.check_has_samples(trainer.train_dataset)
    dataloader = trainer.get_train_dataloader()
    for before_plan in run.extensions.before_plan:
        before_plan(run, dataloader)
    checks.check_has_batches(dataloader, args)
    checks.warn_long_socket_paths(dataloader)
    plan = build.step_plan(args, trainer.set_initial_training_values(args, dataloader))
    console.check_run(args, build.rule_facts(plan, trainer, engine.device))
    loader = run.read_from(
        dataloader,
        plan,
        engine,
        batch_size=trainer._train_batch_size,
        fills_windows=not is_overridden(trainer, "get_batch_samples"),
        rewinds=resolve.checkpoint(args).saves_on_interrupt,
    )
    if not engine.dispatches:
        checks.check_ends_together(plan, loader.position.chunk, engine.num_replicas)
    run.continue_from(checkpoint, args, engine, trainer.train_dataset)


def prepare_run(
    trainer: AnyTrainer, args: Any, checkpoint: Checkpoint | None, trial: Any, ignore_keys: list[str] | None
) -> None:
    """Prepares record, position, model, optimizer and extensions: everything that the loop needs."""
    internals = Internals(trainer)
    run = internals.run
    plan = run.plan
    engine = internals.engine
    path = None if checkpoint is None else str(checkpoint)
    start = trainer._init_training_state(plan.max_steps, plan.steps_per_epoch, plan.num_epochs, path, trial)
    given = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    model, loader = trainer._prepare_for_training(plan.max_steps, run.loader, path)
    internals.services.adoption.note_made(trainer, **given)
    checks.check_needs_no_closure(trainer.optimizer)
    checks.check_optimizer(trainer.optimizer, engine.updated_tensors(trainer.optimizer), trainer.model, model)
    checks.warn_sparse_gradients(engine.unwrap(model), trainer.optimizer)
    if args.save_strategy != "no":
        from trainwright.checkpoint import extra_state

        extra_state.check_extra_states(engine.unwrap(model))
    training_state.collect_item_states(training_state.read_items(trainer))  # raises now the errors of the first save
    run.begin(
        engine,
        args,
        rule=internals.loss_rule(),
        start=start,
        checkpoint=checkpoint,
        fresh_plan=lambda: build.step_plan(args, trainer.set_initial_training_values(args, loader)),
        is_own=not trainer._created_lr_scheduler,
        model=model,
        optimizer=trainer.optimizer,
        scheduler=trainer.lr_scheduler,
        events=trainer.callback_handler,
        trial=trial,
        ignore_keys_for_eval=ignore_keys,
        step_contexts=trainer.step_contexts if has_hook(trainer, "step_contexts", num_arguments=0) else None,
        prepares_windows=has_hook(trainer, "prepare_window", num_arguments=1),
    )
    run.counts_may_be_late = counts_may_be_late(trainer, model)
    context = make_context(trainer, run, trainer._get_output_dir(trial))
    run.extensions.add(*build.make_extensions(Moment.TRAINING, context))
    engine.note_outputs(run.extensions.needs_outputs)
    if checkpoint is not None:
        internals.checkpointer.read_extensions(run, checkpoint)
    for begin in run.extensions.begin:
        begin(run)
    checkpointing.collect_extension_states(run)  # raises now the errors of the first save


# Methods in which a user's code gets the number of label items.
READERS_OF_COUNTS = ("get_batch_samples", "_get_num_items_in_batch", "training_step", "compute_loss")


def counts_may_be_late(trainer: AnyTrainer, model: Any) -> bool:
    """Returns whether the number of label items may arrive during a forward pass.

    Only this package and a model of transformers read it then, by operations of torch, each of which waits for it; a
    compiled model would need it before. Code of the user's may read it in ways that do not wait (`torch.tensor(n)`), so
    it gets the number itself: a loss or a `forward` set on the model, an extension, a kernel.
    """
    if is_overridden(trainer, *READERS_OF_COUNTS) or trainer.compute_loss_func is not None:
        return False
    if Internals(trainer).extensions or get_value(trainer.args, "loss_kernel") is not None:
        return False
    if trainer.args.torch_compile or uncompiled(model) is not model:
        return False
    if trainer.args.world_size == 1 or not trainer.model_accepts_loss_kwargs:
        return False
    core = core_model(trainer.model)
    makers = (type(core), core.forward, getattr(core, "loss_function", None))
    return all(getattr(one, "__module__", "").startswith("transformers.") for one in makers)


CHECKED_METRICS = "metrics   compute_metrics was called once with one batch, to check it before step 1"


def check_evaluation(trainer: AnyTrainer, ignore_keys: list[str] | None = None) -> bool:
    """Raises the errors of the first evaluation before step 1; returns True if it called `compute_metrics`.

    Raises:
        DataError: an evaluation set without samples.
        MetricError: `metric_for_best_model` is not among the metrics of an evaluation.
    """
    if trainer.args.eval_strategy != "no" and trainer.eval_dataset is not None:
        from trainwright.run import dry_run

        return dry_run.check_evaluation(trainer, ignore_keys)
    return False
