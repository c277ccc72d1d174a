"""Which parameters are trained, by the kind of module that they belong to, and how far an adapter reaches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainwright._types import counted, is_instance_of
from trainwright.support import model_facts
from trainwright.support.html_table import html_table
from trainwright.support.tensor_tree import storage_place
from trainwright.support.units import count_text

ATTENTION = "attention"
MLP = "MLP"
EXPERTS = "experts"
ROUTER = "router"
EMBEDDINGS = "embeddings"
HEAD = "head"
STATE_SPACE = "state space"
PROMPT = "prompt"
NORMS = "norms"
OTHER = "other"
KINDS = (ATTENTION, STATE_SPACE, MLP, EXPERTS, ROUTER, EMBEDDINGS, HEAD, PROMPT, NORMS, OTHER)
OF_PROMPT = "prompt_encoder"  # of peft: what it learns in place of words
# Parts of a module's name that tell its kind, the first that fits.
BY_NAME = (
    (EXPERTS, re.compile(r"experts?")),
    (ATTENTION, re.compile(r".*(attn|attention|linear_att).*")),
    (STATE_SPACE, re.compile(r"mixer|mamba\d?|ssm")),
    (
        MLP,
        re.compile(
            r"mlp|ffn|feed_?forward|densereludense|ff|fc\d?|intermediate|shared_experts?|(up|down|gate|gate_up)_proj|output"
        ),
    ),
    (HEAD, re.compile(r"lm_head|score|classifier|cls|qa_outputs|embed_out")),
)
OF_MLP = re.compile(r"(gate|up|down|gate_up)_proj|w[123]$|fc\d|mlp|experts")  # in target_modules
ROUTER_IN_PATTERN = re.compile("gate(?!_proj|_up)|router")
ROUTER_WITH_PARENT = re.compile(r"\w+\.(gate|router|shared_expert_gate)(\.weight)?$")
OF_ADAPTERS = re.compile(r"(^|\.)(base_model\.model|base_layer|modules_to_save\.\w+|original_module)(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfParameters:
    """Parameters of one kind of module; numbers are of single weights."""

    kind: str
    parameters: int  # of the model itself
    trained: int  # an adapter's included
    modules: int = 0  # that an adapter could change: layers with a matrix
    adapted: int = 0  # that it changes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReach:
    """What an adapter of peft was asked to change, and what it changes."""

    kind: str  # such as "LORA"
    unmatched: tuple[str, ...] = ()  # names in target_modules that are the name of no adapted module
    unsaved: tuple[str, ...] = ()  # names in modules_to_save that are the name of no module
    routers: tuple[str, ...] = ()  # routers that it changes
    changes_routers_alone: bool = False
    is_router_named: bool = False  # it was asked to
    fused_experts: tuple[str, ...] = ()  # layers of experts in one parameter that it does not change
    wants_all: bool = False  # it was asked to change all linear layers, or an MLP's
    tied: tuple[str, ...] = ()  # of the tied input and output embeddings, the one that is changed or saved alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameters:
    """What is trained of a model and what is not."""

    kinds: tuple[KindOfParameters, ...]
    adapter: AdapterReach | None = None
    is_tied: bool = False  # input and output embeddings are one tensor

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without an adapter's."""
        return sum(one.parameters for one in self.kinds)

    @property
    def trained(self) -> int:
        """Number of trained weights, an adapter's included."""
        return sum(one.trained for one in self.kinds)

    @property
    def summary(self) -> str:
        """The numbers and kinds in a line."""
        if self.adapter is not None:
            # The adapter's own parameters are beside those of the model.
            start = f"{count_text(self.trained)} parameters by an adapter ({self.adapter.kind}) on"
            size = f"{start} {count_text(self.parameters)}"
        elif self.trained == self.parameters:
            size = f"all {count_text(self.parameters)} parameters"
        else:
            size = f"{count_text(self.trained)} of {count_text(self.parameters)} parameters"
        shown = ", ".join(self._described(one) for one in self.kinds if one.trained) or "nothing"
        left = ", ".join(one.kind for one in self.kinds if not one.trained)
        return f"{size}: {shown}" + (f"; not {left}" if left else "")

    def _described(self, one: KindOfParameters) -> str:
        name = f"{one.kind} (tied with the head)" if one.kind == EMBEDDINGS and self.is_tied else one.kind
        if self.adapter is not None and one.adapted:
            return f"{name} ({one.adapted} of {counted(max(one.modules, one.adapted), 'layer')})"
        return name if one.trained >= one.parameters else f"{name} in part"

    def lines(self) -> Iterator[str]:
        """Yields the summary as a line."""
        yield f"trained   {self.summary}"

    def _repr_html_(self) -> str:
        rows = [(one.kind, f"{one.parameters:,}", f"{one.trained:,}") for one in self.kinds]
        return html_table(rows, header=("kind of module", "parameters", "trained, with an adapter's"))


def read_parameters(model: nn.Module) -> TrainedParameters:
    """Returns what is trained of a model, by its parameters that require gradients."""
    core = model_facts.core_model(model)
    kind_of = _Kinds(model, core)
    adapted = find_adapted(model)
    own_parts = _adapters_parts(model)
    sizes = Counter[str]()
    trained = Counter[str]()
    modules: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters():
        kind = kind_of(name)
        number = model_facts.whole_shape(parameter).numel()
        if own_parts.isdisjoint(name.split(".")):
            sizes[kind] += number
            if parameter.dim() > 1:
                modules.setdefault(kind, set()).add(plain(name.rpartition(".")[0]))
        if parameter.requires_grad:
            trained[kind] += number
    reached = Counter(kind_of(f"{name}.weight") for name in adapted)
    kinds = tuple(
        KindOfParameters(
            kind=kind,
            parameters=sizes[kind],
            trained=trained[kind],
            modules=len(modules.get(kind, ())),
            adapted=reached[kind],
        )
        for kind in KINDS
        if sizes[kind] or trained[kind]
    )
    return TrainedParameters(
        kinds=kinds, adapter=find_reach(model, adapted, kind_of), is_tied=kind_of.is_tied and not adapted
    )


def trains_norms_alone(model: nn.Module) -> bool:
    """Returns whether norms are trained and nothing else."""
    is_norm = [
        _is_norm(module)
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]
    return bool(is_norm) and all(is_norm)


def _is_norm(module: object) -> bool:
    return "norm" in type(module).__name__.lower()


def plain(name: str) -> str:
    """Returns the name of a module or parameter without the names that peft's wrappers add."""
    return OF_ADAPTERS.sub("", model_facts.plain_name(name)).lstrip(".")


# What peft saves whole in a model with one of its tasks, whether the model has it or not.
HEADS_OF_PEFT = {"classifier", "score", "qa_outputs"}


class _Kinds:
    """Tells the kind of module to which a parameter belongs, by its name."""

    def __init__(self, model: nn.Module, core: Any) -> None:
        self._routers = tuple(plain(name) for name in model_facts.router_layers(model))
        self._modules = dict(model.named_modules())
        self._embeddings = _names_within(model, core, "get_input_embeddings")
        self._head = _names_within(model, core, "get_output_embeddings")
        ends = [_weight(core, f"get_{end}_embeddings") for end in ("input", "output")]
        places = [storage_place(end) for end in ends if end is not None]
        self.is_tied = len(places) == 2 and places[0] == places[1]

    def __call__(self, name: str) -> str:
        owner = name.rpartition(".")[0]
        short = plain(owner)
        if OF_PROMPT in owner.split("."):
            return PROMPT
        if any(short == router or short.startswith(f"{router}.") for router in self._routers):
            return ROUTER
        if self._embeddings is not None and (short == self._embeddings or short.startswith(f"{self._embeddings}.")):
            return EMBEDDINGS
        if self._head is not None and (short == self._head or short.startswith(f"{self._head}.")):
            return HEAD
        module = self._modules.get(owner)
        if _is_norm(module):
            return NORMS
        if isinstance(module, nn.Embedding):
            return EMBEDDINGS
        parts = short.split(".")
        for kind, pattern in BY_NAME:
            place = next((i for i, part in enumerate(parts) if pattern.fullmatch(part.lower())), None)
            if place is not None:
                return self._mixer(name, parts[place]) if kind == STATE_SPACE else kind
        return OTHER

    def _mixer(self, name: str, part: str) -> str:
        """Returns the kind of a mixer by its class: hybrid models have attention, MLPs and experts under that name."""
        place = name.split(".").index(part)
        kind = type(self._modules.get(".".join(name.split(".")[: place + 1]))).__name__.lower()
        by_class = {"attention": ATTENTION, "mlp": MLP, "moe": EXPERTS}
        return next((found for word, found in by_class.items() if word in kind), STATE_SPACE)


def _names_within(model: nn.Module, core: Any, getter: str) -> str | None:
    """Returns the plain name of the module that a getter of the core model returns."""
    module = _module(core, getter)
    return None if module is None else next((plain(n) for n, m in model.named_modules() if m is module), None)


def _module(core: Any, getter: str) -> nn.Module | None:
    try:
        found = getattr(core, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _weight(core: Any, getter: str) -> torch.Tensor | None:
    weight = getattr(_module(core, getter), "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


# -- adapters ----------------------------------------------------------------------------------------------------------


def find_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the layers that an adapter changes: those that peft has wrapped, the outer one of several."""
    if not getattr(model, "peft_config", None):
        return {}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names"):
            outer = name.removesuffix(".base_layer")
            if outer == name or outer not in found:
                found[name] = module
    return found


def _adapters_parts(model: nn.Module) -> frozenset[str]:
    """Returns what the parts of adapted layers are called that hold the adapter's own parameters."""
    if not getattr(model, "peft_config", None):
        return frozenset()
    lists: list[Any] = [getattr(module, "adapter_layer_names", ()) for module in model.modules()]
    own = {str(name) for names in lists for name in names if not str(name).startswith("modules_to_save")}
    return frozenset(own | {"original_module", "prompt_encoder"})


def find_reach(model: nn.Module, adapted: Mapping[str, nn.Module], kind_of: _Kinds) -> AdapterReach | None:
    """Compares what the adapters of a model were asked to change with what they change; None without an adapter."""
    configs = getattr(model, "peft_config", None)
    if not configs or not is_instance_of(model, "peft", "PeftModel"):
        return None
    active = [configs[name] for name in _active(model) if name in configs] or list(configs.values())
    config = active[0]
    targets = getattr(config, "target_modules", None)
    names: set[str] = {targets} if isinstance(targets, str) else set(targets or ())
    for other in active[1:]:
        more = getattr(other, "target_modules", None)
        names |= {more} if isinstance(more, str) else set(more or ())
    parameters = set(getattr(config, "target_parameters", None) or ())
    reached = [plain(name) for name in adapted]
    all_linear = _changes_all_linear(model, reached)
    saved = [plain(name) for name, module in model.named_modules() if hasattr(module, "modules_to_save")]
    # Names of excluded modules, and of those saved whole, are no mistake: peft writes them in place of "all-linear".
    is_list = not isinstance(targets, str) and not getattr(config, "exclude_modules", None)
    unmatched = tuple(sorted(n for n in names if not _is_named(n, [*reached, *saved]))) if is_list else ()
    asked = set(getattr(config, "modules_to_save", None) or ()) - HEADS_OF_PEFT
    unsaved = tuple(sorted(n for n in asked if not _is_named(n, saved)))
    routers = tuple(name for name in reached if kind_of(f"{name}.weight") == ROUTER)
    experts = {plain(name) for name in model_facts.expert_layers(model)}
    whole = [plain(n.rpartition(".")[0]) for n, p in model.named_parameters() if p.requires_grad]
    changed = {*reached, *whole}
    missed = sorted(name for name in experts if changed.isdisjoint(_ancestors(name)))
    return AdapterReach(
        kind=" and ".join(str(getattr(one.peft_type, "value", one.peft_type)) for one in active),
        unmatched=unmatched,
        unsaved=unsaved,
        routers=routers,
        changes_routers_alone=bool(routers) and len(routers) == len(reached),
        is_router_named=_names_routers(targets, parameters) or not all_linear,
        fused_experts=tuple(missed),
        wants_all=all_linear or any(OF_MLP.search(name) for name in names),
        tied=tuple(_tied_alone(model, reached, saved, kind_of, config)),
    )


def _active(model: Any) -> list[str]:
    """Returns the names of the adapters that are trained."""
    found = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None) or ()
    return [found] if isinstance(found, str) else list(found)


def _is_named(name: str, modules: list[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _ancestors(name: str) -> list[str]:
    """Returns the name of a module, and of those around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _names_routers(targets: object, parameters: set[str]) -> bool:
    """Returns whether routers are asked for by a pattern, or by a name with that of the module around it."""
    if isinstance(targets, str):
        return ROUTER_IN_PATTERN.search(targets) is not None
    names = [*(targets if isinstance(targets, (set, list, tuple)) else ()), *parameters]
    return any(isinstance(one, str) and ROUTER_WITH_PARENT.search(one) for one in names)


def _changes_all_linear(model: nn.Module, reached: list[str]) -> bool:
    """Returns whether an adapter changes every linear layer but the head.

    peft replaces "all-linear" by the names of the layers, so this is what is left of it.
    """
    core = model_facts.core_model(model)
    layers = set(reached)
    head = _module(core, "get_output_embeddings")
    linear = [plain(name) for name, one in core.named_modules() if isinstance(one, nn.Linear) and one is not head]
    return all(not layers.isdisjoint(_ancestors(name)) for name in linear)


def _tied_alone(model: nn.Module, reached: list[str], saved: list[str], kind_of: _Kinds, config: Any) -> Iterator[str]:
    """Yields the module of the tied embeddings that an adapter changes, or saves, without the other one."""
    core = model_facts.core_model(model)
    if not getattr(getattr(core, "config", None), "tie_word_embeddings", False):
        return
    if getattr(config, "ensure_weight_tying", False):
        return
    if _weight(core, "get_output_embeddings") is None:  # a classifier, whatever its configuration says
        return
    kinds = {kind_of(f"{name}.weight"): name for name in [*reached, *saved]}
    changed = [kinds[kind] for kind in (EMBEDDINGS, HEAD) if kind in kinds]
    if len(changed) == 1:
        yield changed[0]
