"""Proof and ProofReport: what was computed in two ways, whether it agreed, and the setting that cures what did not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright._types import JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Proof of one law.

    Attributes:
        law: what must hold, as a sentence.
        holds: None where it could not be tried.
        evidence: the gap that was seen, or why it could not be tried.
        cure: the setting that makes it hold; empty where it does.
    """

    name: str
    law: str
    holds: bool | None
    evidence: str
    cure: str = ""

    def to_dict(self) -> JSONObject:
        return {name: getattr(self, name) for name in ("name", "law", "holds", "evidence", "cure")}


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Proofs for a model and its data."""

    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing that could be tried failed."""
        return all(proof.holds is not False for proof in self.proofs)

    def of(self, name: str) -> Proof:
        return next(proof for proof in self.proofs if proof.name == name)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        for proof in self.proofs:
            word = {True: "holds", False: "FAILS", None: "not tried"}[proof.holds]
            yield f"{word:10}{proof.law}: {proof.evidence}"
            if proof.cure:
                yield f"{'':10}-> {proof.cure}"

    def to_dict(self) -> JSONObject:
        """Returns plain values, as for JSON."""
        return {"proofs": [proof.to_dict() for proof in self.proofs]}

    def __str__(self) -> str:
        return "\n".join(self.lines())
