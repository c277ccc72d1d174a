"""Checks before step 1: unusable models, data and settings are refused, each with advice."""

from __future__ import annotations

import logging
import os
import reprlib
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset

from trainwright._types import (
    DataLoaderLike,
    DatasetLike,
    Model,
    counted,
    has_length,
    is_instance_of,
    metric_number,
    printable,
)
from trainwright.capability_table import RESERVED_NAMES
from trainwright.config import resolve
from trainwright.config.enums import word
from trainwright.config.fields import batching_fields
from trainwright.config.plans import StepPlan
from trainwright.config.rules.start import needs_length
from trainwright.data.row_names import row_names
from trainwright.data.sources import adapt_data, list_handlers
from trainwright.errors import ArgumentError, DataError, MetricError, MissingModelError, ModelError
from trainwright.loop.extension import Extension
from trainwright.support import model_facts
from trainwright.support.hooks import is_overridden
from trainwright.support.optimizer_facts import may_train, shown_parameters, trained_parameters
from trainwright.support.signatures import read_parameters

logger = logging.getLogger(__name__)

# Methods of the original that do nothing here, and what does their work.
HOOKS_WITHOUT_EFFECT = {
    "_build_accelerator_args": "it is called, but the engine takes its settings from the arguments",
    "_defer_fsdp_gradient_reduction": "the engine defers the reduction of gradients itself",
    "_sync_replicated_trainable_parameters": "the engine keeps parameters that are not sharded equal itself",
}


# The path of a socket has 108 bytes on Linux and 104 elsewhere, with the zero at its end.
LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
# What multiprocessing and torch put behind the temporary directory, by the way in which workers share tensors.
SOCKET_NAMES = {
    "file_descriptor": "/pymp-12345678/listener-12345678",
    "file_system": "/torch-shm-dir-123456/manager.sock",
}
# Packages whose models, trainers and callbacks unfreeze nothing.
OF_LIBRARIES = {"peft", "transformers", "trainwright", "trl"}
MAY_UNFREEZE = ("training_step", "compute_loss", "create_optimizer", "create_optimizer_and_scheduler")


def make_output_dir(folder: str) -> None:
    """Creates the directory of a run; OSError with its name and advice if that fails."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else (error.strerror or type(error).__name__).lower()
        raise type(error)(f"output_dir={folder!r} cannot be made: {why}. Choose another directory.") from None


def check_metrics(args: Any, compute_metrics: Any) -> None:
    """Raises ArgumentError if `compute_metrics` takes single batches but no `compute_result`."""
    if not args.batch_eval_metrics or compute_metrics is None:
        return
    if not model_facts.takes_argument(compute_metrics, "compute_result"):
        raise ArgumentError(
            "batch_eval_metrics=True calls compute_metrics for each batch, the last time with compute_result=True, but "
            "this compute_metrics takes no compute_result. Add the argument, or set batch_eval_metrics=False."
        )


def raise_no_loss(model: Model, inputs: Mapping[str, Any], outputs: Any, loss: object, *, made_by: object) -> NoReturn:
    """Raises ModelError for a loss, of the outputs or `made_by` the user's function, that is not a tensor."""
    if made_by is not None or loss is not None:
        _raise_no_tensor(loss, "compute_loss_func" if made_by is not None else type(model).__name__)
    returned = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    raise ModelError(
        f"{type(model).__name__} returned no loss, only {returned}. It was given {', '.join(inputs)}. A model "
        f"returns a loss when it gets labels. {model_facts.label_cure(model)} For a custom loss, pass "
        "compute_loss_func, or override compute_loss."
    )


def explain_loss(loss: object, model: Model, error: Exception) -> None:
    """Raises ModelError if the loss itself explains an error in the backward pass; else returns."""
    if not isinstance(loss, torch.Tensor):
        _raise_no_tensor(loss, "compute_loss", error)
    if loss.numel() != 1:
        raise ModelError(
            f"The loss has the shape {tuple(loss.shape)}, but it must be one number. Reduce it, for example with "
            "loss.mean(), in the model, compute_loss or compute_loss_func."
        ) from error
    if not loss.is_floating_point():
        raise ModelError(f"The loss has the type {loss.dtype}; gradients need a real floating-point loss.") from error
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _raise_nothing_to_train(model, error)
    raise ModelError(
        f"The loss of {type(model).__name__} has no gradient: no trainable weight contributes to it. It may be "
        "computed under torch.no_grad(), from .detach(), .item() or numpy, or only from outputs of frozen layers; with "
        "activation_checkpointing and frozen embeddings, call model.enable_input_require_grads()."
    ) from error


def _raise_nothing_to_train(model: Model, error: Exception | None = None) -> NoReturn:
    num = len(list(model.parameters()))
    what = f"has {counted(num, 'parameter')}, all of them frozen"
    cure = "Set requires_grad=True on some of them."
    if num == 0:
        what = "has no parameters"
        cure = "Register its weights as nn.Parameter."
    elif hasattr(model, "peft_config"):
        cure = "To train an adapter, load it with PeftModel.from_pretrained(model, path, is_trainable=True)."
    raise ModelError(f"{type(model).__name__} {what}, so there is nothing to train. {cure}") from error


def check_not_frozen(model: Model, callbacks: Iterable[object], trainer: object) -> None:
    """Raises ModelError before anything is prepared if all weights are frozen, and nobody could change that.

    Callbacks and overrides of the user's may unfreeze weights, the loss of a `forward` of the user's may have a
    gradient all the same, and an optimizer of the user's may train what is not the model's. If they do not, the first
    backward pass raises the error.
    """
    parameters = list(model.parameters())
    if not parameters or any(parameter.requires_grad for parameter in parameters):
        return
    given = getattr(trainer, "optimizer", None)
    groups = [] if given is None else given.param_groups
    if any(parameter.requires_grad for group in groups for parameter in group["params"]):
        return
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        return
    inner = model_facts.uncompiled(model)
    makers = [type(one).__module__.partition(".")[0] for one in (inner, trainer, *callbacks)]
    if {*makers} <= OF_LIBRARIES and not is_overridden(trainer, *MAY_UNFREEZE):
        _raise_nothing_to_train(inner)


def _raise_no_tensor(loss: object, maker: str, error: Exception | None = None) -> NoReturn:
    cure = "Return the tensor itself, without .item(), float() or numpy."
    if loss is None:
        cure = "Return the loss (is a return statement missing?)."
    elif isinstance(loss, (Mapping, list, tuple)):
        cure = "Return one scalar tensor; compute_loss returns a tuple (loss, outputs) only for return_outputs=True."
    raise ModelError(f"{maker} returned a {type(loss).__name__} as the loss, which is not a tensor. {cure}") from error


def warn_hooks_without_effect(trainer: object) -> None:
    """Warns, once, of overrides of methods of the original that a run of ours does not need."""
    for name, reason in HOOKS_WITHOUT_EFFECT.items():
        if is_overridden(trainer, name):
            logger.warning("%s.%s has no effect: %s.", type(trainer).__name__, name, reason)


def check_models(model: Model, model_init: Any) -> None:
    """Raises MissingModelError for neither a model nor a `model_init`, and ModelError for both."""
    if model is None and model_init is None:
        raise MissingModelError(
            "Trainer got neither a model nor a model_init. Pass model=..., or model_init=a function that makes one."
        )
    if model is not None and model_init is not None:
        raise ModelError(
            "Trainer got both a model and a model_init, so it is unclear which one to train. Pass only one of them."
        )


def check_head(model: Model) -> None:
    """Raises ModelError for a headless base model of transformers; the message names the class to load instead."""
    if not is_instance_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    core = model_facts.core_model(model)
    names = ([entry] if isinstance(entry, str) else entry for entry in MODEL_MAPPING_NAMES.values())
    has_loss = "return_loss" in (read_parameters(core.forward) or {})  # of pairs: CLIP and its kind
    if any(type(core).__name__ in some for some in names) and not has_loss:
        raise ModelError(
            f"{type(core).__name__} has no head: it returns hidden states and takes no labels, so there is no loss to "
            "train on. Load it with a head for your task, for example "
            "AutoModelForSequenceClassification.from_pretrained(...) or AutoModelForCausalLM.from_pretrained(...)."
        )


def check_datasets(
    args: Any,
    train_dataset: DatasetLike,
    eval_dataset: DatasetLike,
    data_collator: Any,
    *,
    has_own_schedule: bool = False,
) -> None:
    """Raises DataError for data of unknown length or missing evaluation data, TypeError for an invalid collator."""
    if not callable(data_collator):
        raise TypeError(
            f"data_collator={data_collator!r} cannot be called; pass a function (or an object with __call__) that "
            "makes a batch from a list of samples."
        )
    if args.eval_strategy != "no" and eval_dataset is None:
        raise DataError(
            f"eval_strategy={str(getattr(args.eval_strategy, 'value', args.eval_strategy))!r} asks for evaluations, "
            "but there is no eval_dataset. Pass one, or set eval_strategy='no'."
        )
    check_form(args, train_dataset)
    is_formed_stream = bool(batching_fields(args)) and isinstance(train_dataset, IterableDataset)
    has_known_end = has_length(train_dataset) and not is_formed_stream
    if train_dataset is None or has_known_end or args.max_steps > 0:
        return
    needs = needs_length(args, has_own_schedule=has_own_schedule)
    if needs is not None:
        what = "without a length"
        if is_formed_stream:
            what = f"read as a stream with {batching_fields(args)[0]}"
        raise DataError(
            f"train_dataset is a {type(train_dataset).__name__} {what} and max_steps={args.max_steps}, so "
            f"the number of steps is unknown, but {needs} needs it. Set max_steps, or pass a dataset with __len__, "
            "or choose settings that do not need it (lr_scheduler_type='constant', 'constant_with_warmup' or "
            "'inverse_sqrt', intervals in whole steps): then training runs for num_train_epochs full passes."
        )


def adapt_train_data(args: Any, train_dataset: DatasetLike) -> DatasetLike:
    """Returns the checked training data that is read for what a user passed, such as a dict of datasets."""
    adapted = adapt_data(train_dataset)
    check_id_column(args, adapted)
    if adapted is not train_dataset:
        check_form(args, adapted)
    return adapted


def check_form(args: Any, train_dataset: DatasetLike) -> None:
    """Raises ArgumentError if the arguments do not fit training data of a form that a capability reads."""
    for handler in list_handlers():
        handler.check(args, train_dataset)


def check_id_column(args: Any, train_dataset: DatasetLike) -> None:
    """Raises DataError for an id column that is missing from the first row of a source.

    Also raises it for a stream, whose rows cannot be read again for their ids.
    """
    column = resolve.id_column(args)
    if column is None or train_dataset is None:
        return
    if isinstance(train_dataset, IterableDataset):
        raise DataError(
            f"id_column={column!r} names rows that can be read by index, but the training data is a stream. Leave it "
            "out: samples of a stream are named by source and position, and trainer.quarantine has its own column "
            "argument."
        )
    for source in row_names(train_dataset, id_column=column).sources:
        if source.size:
            source.find_name(0)


def check_optimizers(args: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, model_init: Any) -> None:
    """Raises ArgumentError for two optimizers, and for settings that a custom optimizer cannot follow."""
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise ArgumentError(
            "Both optimizers=(...) and optimizer_cls_and_kwargs=(...) name an optimizer. Pass only one of them."
        )
    idle = [name for name in ("lr_groups", "layerwise_lr_decay") if getattr(args, name, None)]
    if idle and optimizers[0] is not None:
        raise ArgumentError(
            f"{' and '.join(idle)} creates parameter groups, but the optimizer in optimizers=(...) has its own. "
            "Pass optimizer_cls_and_kwargs, or set the rates in your optimizer."
        )
    if model_init is not None and any(part is not None for part in optimizers):
        raise ArgumentError(
            "optimizers=(...) is for one model, but model_init makes a new one for each train(). Pass "
            "optimizer_cls_and_kwargs, or override create_optimizer_and_scheduler."
        )


def check_extension(extension: Any, others: Iterable[Extension], *, is_training: bool) -> None:
    """Raises ArgumentError for an extension that cannot be added."""
    kind = type(extension).__name__
    if not isinstance(extension, Extension):
        raise ArgumentError(
            f"{extension!r} is not an extension. Pass an instance of a subclass of trainwright.Extension; pass "
            "callbacks to add_callback."
        )
    if not isinstance(extension.name, str) or not extension.name:
        raise ArgumentError(f"{kind} has no name. Set one in its class: name = 'my_extension'.")
    taken = RESERVED_NAMES | {one.name for one in others}
    if extension.name in taken:
        raise ArgumentError(f"There is already an extension named {extension.name!r}. Give {kind} another name.")
    if is_training:
        raise ArgumentError(f"{kind} was added during training. Add extensions before train().")


def check_needs_no_closure(optimizer: Any) -> None:
    """Raises ArgumentError for an optimizer that reevaluates the loss in its step, such as torch's LBFGS."""
    closure = (read_parameters(optimizer.step) or {}).get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise ArgumentError(
            f"{name}.step() needs a closure that recomputes the loss several times per step, but training "
            "calls step() without one, as transformers' Trainer does. Choose another optimizer, or make a subclass of "
            f"{name} whose step() has its own closure, for example over all samples of a small dataset."
        )


def check_optimizer(optimizer: Any, held: Iterable[torch.Tensor], model: Model, wrapped: Model) -> None:
    """Raises ArgumentError for an optimizer that has none of the parameters that a run would train.

    It may have some of them alone, and others besides.

    Args:
        optimizer: of the run.
        held: tensors that it refers to.
        model: of the trainer.
        wrapped: that model as the engine wrapped it.
    """
    shown = shown_parameters(optimizer, [model, wrapped])
    if may_train(held, shown, trained_parameters([model, wrapped])):
        return
    raise ArgumentError(
        f"The optimizer ({type(optimizer).__name__}, {counted(len(shown), 'parameter')}) has none of the "
        f"{len(trained_parameters([model]))} trainable parameters of {type(model_facts.core_model(model)).__name__}, "
        "so training would not change the model. It was made for another model, or for this one before it was copied "
        "or replaced. Make it from trainer.model.parameters(), or set trainer.optimizer and trainer.lr_scheduler to "
        "None: train() makes new ones."
    )


def warn_long_socket_paths(dataloader: Any) -> None:
    """Logs a warning if no batch can come from the workers of a dataloader: the paths of their sockets are too long."""
    num_workers = getattr(dataloader, "num_workers", 0)
    name = SOCKET_NAMES.get(torch.multiprocessing.get_sharing_strategy())  # type: ignore[no-untyped-call]
    if not num_workers or name is None:
        return
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    longest = LONGEST_SOCKET_PATH - len(name)
    if length > longest:
        logger.warning(
            "%s of a dataloader sends tensors by a socket below the temporary directory, whose path is %d bytes long; "
            "at most %d fit, so no batch arrives. Set TMPDIR to a shorter path, such as /tmp.",
            "A worker" if num_workers == 1 else f"Each of the {num_workers} workers",
            length,
            longest,
        )


def warn_sparse_gradients(model: Model, optimizer: Any) -> None:
    """Warns if an optimizer of torch's does not take the sparse gradients of the model's embeddings."""
    takes_sparse = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, takes_sparse):
        return
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse]
    if names:
        logger.warning(
            "%s has sparse gradients (sparse=True), which %s does not take: it raises an error in the first step that "
            "uses it. Set optim='sgd' or 'adagrad', pass optimizers=(...), or make it with sparse=False.",
            ", ".join(names),
            type(optimizer).__name__,
        )


def need_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer of a trainer; raises ValueError if there is none yet."""
    if optimizer is None:
        raise ValueError("There is no optimizer yet: it is made by train(), or by create_optimizer().")
    return optimizer


def need_best_metric(metric_for_best_model: str, metrics: Mapping[str, float]) -> float:
    """Returns the metric that decides the best model, or raises MetricError.

    NaN and a warning if it is not a number.
    """
    name = metric_for_best_model if metric_for_best_model.startswith("eval_") else f"eval_{metric_for_best_model}"
    if name not in metrics:
        raise MetricError(
            f"metric_for_best_model={metric_for_best_model!r}, but the evaluation returned no {name!r}. It returned "
            f"{', '.join(sorted(metrics))}. Choose one of these, or return it from compute_metrics."
        )
    value = metric_number(metrics[name])
    if value != value:
        shown = printable(name), reprlib.repr(metrics[name])
        logger.warning("%s is %s in this evaluation; such a value is never the best.", *shown)
    return value


def ranked_steps(
    metric_for_best_model: str, history: Iterable[Mapping[str, Any]], *, is_greater_better: bool
) -> list[int]:
    """Returns the evaluated steps of a log, best first; the last evaluation of a step counts, and NaN is ignored."""
    name = metric_for_best_model if metric_for_best_model.startswith("eval_") else f"eval_{metric_for_best_model}"
    values = {entry["step"]: metric_number(entry[name]) for entry in history if name in entry and "step" in entry}
    numbers = {step: value for step, value in values.items() if value == value}
    return sorted(numbers, key=lambda step: numbers[step], reverse=is_greater_better)


def check_drives_itself(trainer: object, called: str, args: Any) -> None:
    """Raises ArgumentError if `steps()` or `fit_step()` would ignore a setting or an override of a subclass."""
    is_own = called == "steps"
    hooks = ("_inner_training_loop", "_run_epoch", *(["training_step"] if is_own else []))
    name = next((hook for hook in hooks if is_overridden(trainer, hook)), None)
    if name is not None:
        other = "train() or fit_step()" if name == "training_step" else "train()"
        raise ArgumentError(
            f"{called}() cannot call {type(trainer).__name__}.{name}, since your own loop replaces it. Use "
            f"{other}, or move its code into your loop and remove the override."
        )
    if is_own and args.auto_find_batch_size:
        raise ArgumentError(
            "auto_find_batch_size=True repeats the forward passes of a window that does not fit into memory, but in "
            "steps() they are in your loop. Use train() or fit_step(), or set auto_find_batch_size=False."
        )


def check_has_samples(dataset: DatasetLike) -> None:
    """Raises DataError for an empty training set."""
    if has_length(dataset) and len(dataset) == 0:
        raise DataError("train_dataset is empty: it has no samples to train on. Check how it was made or filtered.")


def check_is_dataset(dataset: DatasetLike, description: str) -> None:
    """Raises DataError for data that torch's DataLoader cannot read, such as a generator, an iterator or a set."""
    is_stream = isinstance(dataset, IterableDataset) or is_instance_of(dataset, "datasets", "IterableDataset")
    if is_stream or any(hasattr(dataset, name) for name in ("__getitem__", "__getitems__")):
        return
    raise DataError(
        f"The {description.lower()} dataset is a {type(dataset).__name__}, which cannot be indexed. Make a "
        "list from it, or a torch.utils.data.IterableDataset with an __iter__ that starts over each epoch "
        "(datasets.IterableDataset.from_generator makes one from a generator function)."
    )


def check_sets_have_samples(args: Any, eval_dataset: DatasetLike) -> None:
    """Raises DataError if a metric decides the best model but no evaluation set has samples."""
    sets = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
    is_empty = bool(sets) and all(has_length(dataset) and len(dataset) == 0 for dataset in sets)
    if is_empty and args.metric_for_best_model is not None:
        raise DataError(
            f"metric_for_best_model={args.metric_for_best_model!r} cannot be computed: eval_dataset is empty. Check "
            "how it was made or filtered, or leave it out and set eval_strategy='no'."
        )


def check_has_batches(dataloader: DataLoaderLike, args: Any) -> None:
    """Warns if all samples together make no batch; DataError if the length of the run would depend on it."""
    if not has_length(dataloader) or len(dataloader) > 0:
        return
    message = (
        "The training dataloader yields no batch. With dataloader_drop_last=True, a dataset smaller than one batch of "
        f"per_device_train_batch_size={args.per_device_train_batch_size} is dropped entirely: lower that size, or set "
        "dataloader_drop_last=False."
    )
    if args.max_steps <= 0:
        raise DataError(message)
    logger.warning("%s No step is trained.", message)


def check_ends_together(plan: StepPlan, chunk: int | None, num_processes: int) -> None:
    """Raises DataError if processes might not end at the same step; our own loaders (with `chunk`) ensure it."""
    if plan.has_open_end and num_processes > 1 and chunk is None:
        raise DataError(
            f"The training dataloader is your own and has no length, and {num_processes} processes train, so they may "
            "not all end at the same step. Set max_steps, or leave get_train_dataloader to the trainer."
        )


def check_trainable(model: Model, mixed: str) -> None:
    """Raises ModelError for fp16 weights with fp16 autocast, and for quantised weights that cannot be trained."""
    halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if mixed == "fp16" and halves:
        raise ModelError(
            f"fp16=True keeps weights in fp32 and scales the loss, but {len(halves)} trainable weights are fp16 "
            f"({halves[0]}, ...): their gradients would underflow and cannot be unscaled. Load the model with "
            "dtype=torch.float32, or train it in bf16."
        )
    if getattr(model, "is_quantized", False):
        _check_quantized(model)


def _check_quantized(model: Model) -> None:
    """Raises ModelError for a quantised model whose weights, kernels or compiled form cannot be trained.

    An adapter that transformers loaded is not refused: the original trains it whatever the quantisation says of itself.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    is_trainable = bool(getattr(quantizer, "is_trainable", False))
    name = type(model_facts.uncompiled(model)).__name__
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", type(quantizer).__name__)
    cannot = f"{name} is quantised with {word(method)}, which cannot be trained, not even below an adapter"
    has_adapter = bool(getattr(model, "peft_config", None))
    base = model.get_base_model() if hasattr(model, "get_base_model") else None  # inside an adapter of peft
    if has_adapter and base is None:
        if quantizer is not None and not is_trainable:
            logger.warning("%s. If the loss does not fall, load the model in another quantisation.", cannot)
        return
    if any(one is not None and model_facts.uncompiled(one) is not one for one in (model, base)):
        raise ModelError(
            f"{name} is quantised and was compiled with torch.compile: an adapter on it is not trained in this form. "
            "Pass the model as it was before compiling it."
        )
    if not has_adapter and not getattr(quantizer, "is_qat_trainable", False):
        raise ModelError(
            f"{name} is quantised; its weights cannot be trained, only embeddings and norms would be. Train an adapter "
            "on it (peft.get_peft_model), or load it unquantised."
        )
    if quantizer is not None and not is_trainable:
        raise ModelError(f"{cannot}. Load the model unquantised, or in a quantisation that can be trained.")
