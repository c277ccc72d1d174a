"""Facts that a model's class and signature tell: its labels, whether its loss counts items or shifts labels.

Read once, when a trainer is made or a run starts. Nothing here runs the model or changes it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright._types import JSONObject, Model, is_instance_of
from trainwright.support.replaced import current
from trainwright.support.signatures import read_code, read_parameters, read_signature, takes_any_keyword

WRAPPER = re.compile(r"_(?:\w+?_wrapped_module|orig_mod)\.")  # torch's wrappers, in the names of parameters and modules


def core_model(model: Model) -> Any:
    """Returns the model inside PEFT adapters and a compiled wrapper; its `forward` names the inputs."""
    model = cast(Model, uncompiled(model))
    if is_instance_of(model, "peft", "PeftModel"):
        return model.get_base_model()
    if is_instance_of(model, "peft", "PeftMixedModel"):
        return model.base_model.model
    return model


def plain_name(name: str) -> str:
    """Returns the name of a parameter or module without the names of torch's wrappers in it."""
    return WRAPPER.sub("", name)


def uncompiled(model: Model) -> nn.Module:
    """Returns the module inside the wrapper of `torch.compile`, or any other model itself."""
    inner: nn.Module = next(model.children()) if type(model).__name__ == "OptimizedModule" else model
    return inner


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Layout of a model that came in parts: processes for its layers, its data and its depth; None where unknown."""

    tp: int | None = None
    dp: int | None = None
    pp: int = 1
    ep: int = 1  # processes among which experts are shared out; they are counted in `tp` or `dp`
    experts: tuple[int, ...] = ()  # the different numbers of experts of its layers
    dispatch: str = "auto"  # how tokens reach their experts
    has_others: bool = False  # it has other weights than the parts, such as the weights of an adapter


def model_layout(model: Model) -> ModelLayout | None:
    """For a model that was taken apart before the trainer got it, as transformers does when it loads one; else None."""
    core = core_model(model)
    if getattr(core, "is_distributed_loading_by_transformers", False):
        sizes = core.config.distributed_config
        return ModelLayout(
            tp=sizes.tp_size,
            dp=sizes.dp_size,
            pp=sizes.pp_size,
            ep=sizes.ep_size,
            experts=tuple(sorted({num_experts(one) for one in expert_layers(core).values()})),
            dispatch=sizes.ep_implementation,
            has_others=bool(getattr(model, "peft_config", None))
            or (sizes.dp_size > 1 and any(not spans_replicas(one, sizes.tp_size) for one in model.parameters())),
        )
    parameters = core.parameters() if hasattr(core, "parameters") else ()  # a DTensor: each process holds a part
    return ModelLayout() if any(hasattr(parameter, "device_mesh") for parameter in parameters) else None


def spans_replicas(parameter: nn.Parameter, tp: int) -> bool:
    """Returns whether a parameter is shared out over processes with tokens of their own, so that torch averages it.

    Args:
        parameter: of a model that came in parts.
        tp: processes in a row that share layers, and so have the same tokens.
    """
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and len({rank // tp for rank in mesh.mesh.flatten().tolist()}) > 1


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the modules that hold experts as stacks of matrices: parameters (experts, rows, columns)."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and any(len(whole_shape(p)) == 3 for p in module.parameters(recurse=False))
    }


ROUTERS = ("gate", "router", "shared_expert_gate")


def router_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the modules that decide which experts a token goes to: they stand beside the experts."""
    modules = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last in ROUTERS and any("expert" in child for child, _ in modules[parent].named_children() if child != last):
            found[name] = module
    return found


def num_experts(layer: nn.Module) -> int:
    """Returns the experts of one of `expert_layers` in all processes; the module's own count is of this process."""
    shapes = (whole_shape(parameter) for parameter in layer.parameters(recurse=False))
    return next(shape[0] for shape in shapes if len(shape) == 3)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns the shape of a parameter in all processes: one that ZeRO 3 has partitioned is empty, and notes it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def num_devices(model: Model) -> int:
    """Devices over which transformers laid a model out when it loaded it; 0: it was not asked to."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"})


# Signatures of the `forward` of classes, by class; signatures of single instances are not kept.
_SIGNATURES: MutableMapping[object, inspect.Signature] = WeakKeyDictionary()

# Of a `forward` whose signature cannot be read: it may take anything.
_UNKNOWN = inspect.Signature([inspect.Parameter("any_input", inspect.Parameter.VAR_KEYWORD)])


def forward_parameters(model: Model) -> dict[str, inspect.Parameter]:
    """Returns the parameters of `forward` by name, of the model inside any wrapper."""
    core = core_model(model)
    function = getattr(core.forward, "__func__", None)
    if function is None or function is not getattr(type(core), "forward", None):
        return dict((read_signature(core.forward) or _UNKNOWN).parameters)
    if function not in _SIGNATURES:
        _SIGNATURES[function] = read_signature(core.forward) or _UNKNOWN
    return dict(_SIGNATURES[function].parameters)


def find_label_names(model: Model) -> list[str]:
    """Inputs of `forward` that are labels: names with "label" in them, and a span's two ends for extractive QA."""
    replacement: Any = current("find_labels", None)
    if replacement is not None:
        return list(replacement(type(core_model(model))))
    names = list(forward_parameters(model))
    if "QuestionAnswering" in type(core_model(model)).__name__:
        return [n for n in names if "label" in n or n in ("start_positions", "end_positions")]
    return [n for n in names if "label" in n]


TEXT_LABELS = "Labels that are texts need numbers: dataset.class_encode_column('label') gives them."


def label_cure(model: Model) -> str:
    """Returns sentences that say how samples for this model get labels."""
    name = type(core_model(model)).__name__
    if "CausalLM" in name or "LMHead" in name:
        return (
            "For a language model, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) makes labels "
            "from input_ids."
        )
    if "MaskedLM" in name:
        return "DataCollatorForLanguageModeling(tokenizer) masks tokens and makes labels from them."
    names = " and ".join(map(repr, find_label_names(model) or ["labels"]))
    return f"Give the samples {names}. {TEXT_LABELS}"


def returns_loss_by_default(model: Model) -> bool:
    """Returns True if `forward` computes a loss without labels (contrastive models: `return_loss=True` by default)."""
    replacement: Any = current("can_return_loss", None)
    if replacement is not None:
        return bool(replacement(type(core_model(model))))
    parameter = forward_parameters(model).get("return_loss")
    return parameter is not None and parameter.default is True


_COUNT = "num_items_in_batch"
# Packages whose models are known: they are given the number of items as the original gives it.
_KNOWN_PACKAGES = frozenset({"transformers", "peft", "liger_kernel", __name__.partition(".")[0]})


def has_own_loss(model: Model) -> bool:
    """Returns True if `forward`, or the loss function that it calls, is the user's own code."""
    core = core_model(model)
    functions = (type(core).forward, getattr(core, "loss_function", None))
    return any(_is_own(function) for function in functions if function is not None)


def _is_own(function: object) -> bool:
    module = getattr(inspect.unwrap(function) if callable(function) else function, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] not in _KNOWN_PACKAGES


def accepts_loss_kwargs(model: Model, *, by_name: bool = True) -> bool:
    """Returns True if `forward` takes `num_items_in_batch`: the model says so itself, or by name, or any keyword.

    Not if its own code passes its keywords on to something that does not take the number, as a wrapper may. With
    `by_name=False`, as in the original, a parameter with that name is not enough.
    """
    core = core_model(model)
    declared = getattr(core, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = forward_parameters(model)
    if parameters == _UNKNOWN.parameters:
        return False
    keywords = next((name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    if keywords is None:
        return by_name and _COUNT in parameters
    return _COUNT in parameters or not _is_own(type(core).forward) or _passes_count_on(core, keywords)


def _passes_count_on(core: nn.Module, keywords: str) -> bool:
    """Returns False if `forward` calls something with all of its `keywords` that does not take the number of items."""
    code = read_code(type(core).forward)
    if code is None or _COUNT in {*code.co_consts, *code.co_varnames}:  # it looks for the number
        return True
    tree = _source_tree(inspect.unwrap(type(core).forward))
    if tree is None:
        return _is_taken_within(core)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    forwarding = [call for call in calls if any(_unpacks(one, keywords) for one in call.keywords)]
    return all(_callee_takes_count(core, call.func) for call in forwarding)


def _unpacks(argument: ast.keyword, name: str) -> bool:
    """Returns whether an argument of a call is `**name`, or `**` of something made from it."""
    names = (node.id for node in ast.walk(argument.value) if isinstance(node, ast.Name))
    return argument.arg is None and name in names


def _callee_takes_count(core: nn.Module, callee: ast.expr) -> bool:
    """Returns whether what a call in `forward` calls takes the number of items; where unknown, whether a child does."""
    path = ast.unparse(callee)
    if path in ("super().forward", "super().__call__"):
        owners = [cls for cls in type(core).__mro__ if "forward" in vars(cls)]
        return takes_argument(vars(owners[1])["forward"], _COUNT)
    root, _, rest = path.partition(".")
    found: Any = core if root == "self" else inspect.unwrap(type(core).forward).__globals__.get(root)
    try:
        found = functools.reduce(getattr, rest.split("."), found) if rest else found
    except AttributeError:
        found = None
    if isinstance(found, nn.Module):
        return accepts_loss_kwargs(found)
    return _is_taken_within(core) if found is None or not callable(found) else takes_argument(found, _COUNT)


def _is_taken_within(core: nn.Module) -> bool:
    """Returns whether a child takes the number of items; True without children, since then nothing is known."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    children = list(core.children())
    return not children or any(
        _is_taken_within(child) if isinstance(child, lists) else accepts_loss_kwargs(child) for child in children
    )


_MEANS = {"CrossEntropyLoss", "BCEWithLogitsLoss", "BCELoss", "MSELoss", "L1Loss", "NLLLoss"}


def ignores_item_count(model: Model) -> bool:
    """Returns True if `forward` accepts `num_items_in_batch` like any other keyword and still returns a mean.

    So do the heads of BERT and T5: their code uses a mean loss of torch, and neither the count nor the
    model's loss function, which would divide by it. So do classifiers on top of Llama, whose code calls that function
    without the keywords that `forward` was given. False wherever the code does not show it.
    """
    core = core_model(model)
    code = read_code(type(core).forward)
    if code is None or not accepts_loss_kwargs(model):
        return False
    forward = inspect.unwrap(type(core).forward)
    constants = {word for word in code.co_consts if isinstance(word, str)}
    words = {*code.co_names, *code.co_varnames, *constants}
    if _COUNT in words or {"sum", "none"} & constants:
        return False
    if "loss_function" in words:
        return _drops_keywords(forward) or _has_mean_loss_function(core)
    return bool(_MEANS & words)


def _has_mean_loss_function(core: Any) -> bool:
    """Returns True if a classifier's loss is for regression or several labels, which takes no count."""
    config = getattr(core, "config", None)
    name = getattr(core.loss_function, "__name__", "")
    kind = getattr(config, "problem_type", None)
    is_regression = kind is None and getattr(config, "num_labels", 0) == 1
    return name == "ForSequenceClassificationLoss" and (
        is_regression or kind in ("regression", "multi_label_classification")
    )


@functools.cache
def _drops_keywords(forward: Callable[..., object]) -> bool:
    """Returns whether `forward` never passes its own keywords on to the loss function."""
    tree = _source_tree(forward)
    if tree is None:
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    losses = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"]
    return bool(losses) and all(keyword.arg is not None for call in losses for keyword in call.keywords)


def _source_tree(function: Callable[..., object]) -> ast.AST | None:
    """Returns the parsed source of a function; None where it cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None


def shifts_labels(model: Model, *, declared_only: bool = False) -> bool:
    """Returns True if the model's loss compares position i with label i + 1, so that label 0 is never a target.

    The loss function itself decides, not a declared loss type: a causal model without a declared type (GPT-2) falls
    back to the causal loss and shifts too; not with `declared_only`, as in the original.
    """
    core = core_model(model)
    if getattr(getattr(core, "config", None), "is_encoder_decoder", False):
        return False
    if declared_only and getattr(core, "loss_type", None) is None:
        return False
    return getattr(getattr(core, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def auxiliary_coefficient(model: Model) -> float:
    """Factor with which a mixture of experts adds its balance loss (`aux_loss`) to its loss; 0 for other models."""
    config = getattr(core_model(model), "config", None)
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)


def is_causal_lm(model: Model) -> bool:
    """Returns True if the logits at position i score token i + 1; label smoothing must shift then."""
    name = type(core_model(model)).__name__
    encoder_decoder = getattr(getattr(core_model(model), "config", None), "is_encoder_decoder", False)
    return not encoder_decoder and name.endswith(("ForCausalLM", "LMHeadModel"))


def main_input_name(model: Model) -> str:
    """Name of the main input: as the model says, else `input_ids`."""
    return getattr(model, "main_input_name", "input_ids")


def takes_any_input(model: Model) -> bool:
    """Returns True if `forward` takes whatever a sample holds: a module of the user's own with `**kwargs`.

    transformers' models have `**kwargs` too, for attention kernels and the like; a column of text is none of these.
    """
    core = core_model(model)
    parameters = forward_parameters(model)
    if parameters == _UNKNOWN.parameters:
        return True
    return takes_any_keyword(parameters) and not is_instance_of(core, "transformers.modeling_utils", "PreTrainedModel")


def takes_argument(function: Any, name: str) -> bool:
    """Returns True if a function (or an object with `__call__`) has a parameter of this name, or takes any keyword.

    True too if its signature cannot be read.
    """
    parameters = read_parameters(function)
    return parameters is None or name in parameters or takes_any_keyword(parameters)


def signature_columns(model: Model, label_names: list[str]) -> list[str]:
    """Columns of a dataset that `forward` can take; `label` and `label_ids` are renamed by the default collator."""
    names = list(forward_parameters(model))
    return names + [n for n in dict.fromkeys(["label", "label_ids", *label_names]) if n not in names]


def num_parameters_without_embeddings(model: nn.Module) -> int:
    """Parameters that take part in matrix products, for the 6 x parameters x tokens estimate; 0 where unknown."""
    count = getattr(model, "num_parameters", None)
    if not callable(count):
        return 0
    if not any(num_elements(p) != p.numel() for p in model.parameters()):
        return int(count(exclude_embeddings=True))
    embeddings = embedding_ids(model)
    return sum(num_elements(p) for p in model.parameters() if id(p) not in embeddings)


def embedding_ids(model: nn.Module) -> set[int]:
    """Returns the `id` of each parameter of an embedding."""
    return {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}


def summary(model: Model) -> JSONObject:
    """Returns the class of a model and how many parameters it has and trains."""
    sizes = [(num_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return {"class": type(model).__name__, "parameters": sum(size for size, _ in sizes), "trained_parameters": trained}


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of a whole parameter, even if this process holds none of them at the time."""
    if is_lazy(parameter):
        return 0  # its size is found in the first forward pass
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def num_bytes(model: Model) -> int:
    """Returns the memory of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) if hasattr(model, "parameters") else 0


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Returns the names of parameters that are one and the same, in groups; [] where none is shared."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Makes parameters one again that `tied_parameters` named, if a move to another device has copied them.

    torch makes new parameters, one per name, for a module that moves to a device unknown to it.
    """
    for first, *others in ties:
        shared = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name) is not shared:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, shared)
