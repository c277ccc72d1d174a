"""What a run trains, as a whole: for the plan, the check-up, the journal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from trainwright._types import Batch, JSONObject
from trainwright.capabilities.what_is_trained.parameters import TrainedParameters, read_parameters
from trainwright.capabilities.what_is_trained.tokens import TrainedTokens, read_tokens
from trainwright.support.html_table import html_section


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIsTrained:
    """Tokens and parameters that a run trains."""

    tokens: TrainedTokens
    parameters: TrainedParameters
    name: str = "what_is_trained"

    def lines(self) -> Iterator[str]:
        """Yields the lines for the console: at most five."""
        yield from self.parameters.lines()
        yield from self.tokens.lines()

    def to_dict(self) -> JSONObject:
        """Returns plain values, for the journal."""
        return {
            "text": [self.parameters.summary, self.tokens.summary],
            "tokens": asdict(self.tokens),
            "parameters": asdict(self.parameters),
        }

    def _repr_html_(self) -> str:
        return html_section("What is trained", self.parameters._repr_html_(), self.tokens._repr_html_())


def read_section(batches: Sequence[Batch], model: nn.Module, processing_class: Any) -> WhatIsTrained | None:
    """Returns what is trained by batches; None if they are not those of a language model."""
    tokens = read_tokens(batches, model, processing_class)
    return None if tokens is None else WhatIsTrained(tokens=tokens, parameters=read_parameters(model))
