"""The question whether the user's own loss is a mean; none if it is known, or makes no difference.

It makes none in one process if no window has several micro-batches, or parts of one.
"""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value
from trainwright.support import model_facts
from trainwright.support.hooks import has_hook, is_overridden


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the question, if the answer changes how losses are scaled."""
    run = context.run
    hooks = context.hooks
    engine = context.engine
    args = context.args
    is_alone = engine.num_batch_parts == engine.num_replicas == 1
    may_have_several = run.plan.micro_batches > 1 or args.auto_find_batch_size
    may_have_several = may_have_several or is_overridden(hooks, "get_batch_samples")
    may_have_several = may_have_several or has_hook(hooks, "prepare_window", num_arguments=1)
    if not run.losses.rule.is_open or (is_alone and not may_have_several):
        return None
    from trainwright.capabilities.loss_question.extension import LossQuestion

    core = model_facts.core_model(hooks.model)
    functions = [hooks.compute_loss, hooks.compute_loss_func, type(core).forward]
    if is_overridden(hooks, "compute_loss"):
        subject = f"compute_loss of {type(hooks).__name__}"
    elif hooks.compute_loss_func is not None:
        subject = "compute_loss_func"
    else:
        subject = type(core).__name__
    return LossQuestion(
        run,
        hooks,
        engine,
        functions=functions,
        subject=subject,
        weighting=get_value(args, "loss_weighting"),
        factor=args.gradient_accumulation_steps * engine.num_replicas,
        folder=context.folder,
        show=context.show,
    )


CAPABILITY = Capability(make=make)
