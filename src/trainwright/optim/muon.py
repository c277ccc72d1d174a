"""Muon for matrices in parts and in stacks: each update is that of the whole matrix.

Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix, which needs all of it. This is torch's own `Muon` to
the bit for a whole matrix, and goes beyond it:

- A parameter (experts, rows, columns) is a stack of matrices. Each of them is orthogonalised for itself.
- A matrix that processes have in parts (FSDP2, HSDP) is put together in one of them, its owner, which sends parts of
  the result back. All matrices of a step travel in two exchanges, there and back, in bfloat16, in which the iteration
  computes. Each process owns about as much work as the others. (Liu et al., 2025, arXiv 2502.16982, gather each matrix
  in turn.)
- A stack that is cut between its matrices, as FSDP2 and expert parallelism do, needs no exchange.
- Query, key and value in one matrix can be orthogonalised apart.

The momentum is updated in the parts, since it is elementwise. Where a dimension is cut twice, or two are cut,
every process gathers the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainwright.optim.parameter_groups import Group
from trainwright.support.tensor_tree import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic polynomial; Jordan et al., 2024
EPS = 1e-7  # the smallest norm by which a matrix is divided
# Key of a group whose matrices are treated in sections: the axis, and the width of each section.
SECTIONS = "sections"

Sections: TypeAlias = tuple[int, list[int]]


class MatrixMuon(Optimizer):
    """Muon for matrices (rows, columns) and stacks (count, rows, columns), whole or `DTensor`.

    Args:
        params: groups of them; matrices of a group with `sections` are orthogonalised in sections.
        lr: learning rate, before `adjust_lr_fn` adapts it to the shape of each matrix.
        weight_decay: decoupled, as in AdamW.
        momentum: of the exponential average of the gradients.
        nesterov: whether the gradient enters the average once more for the update.
        ns_steps: steps of the Newton-Schulz iteration.
        adjust_lr_fn: "match_rms_adamw" (Liu et al., 2025: updates as large as AdamW's) or "original" (Jordan et al.).
    """

    def __init__(
        self,
        params: list[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared_out: dict[tuple[DeviceMesh, int], list[MuonUpdate]] = {}
        for update in self._updates():
            place = update.find_cut()
            if update.is_local:
                update.apply(update.compute_direction(update.part) if update.part.numel() else update.part)
            elif place is None:
                update.apply_gathered()
            else:
                shared_out.setdefault(place, []).append(update)
        for (mesh, mesh_dim), updates in shared_out.items():
            for update, direction in zip(updates, sharded_directions(updates, mesh, mesh_dim), strict=True):
                update.apply(direction)
        return loss

    def _updates(self) -> Iterator[MuonUpdate]:
        """Yields all updates of a step, with the momentum of the parts that this process has."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
                gradient = local_part(parameter.grad)
                average = local_part(state["momentum_buffer"])
                average.lerp_(gradient, 1 - group["momentum"])
                part = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
                yield MuonUpdate(parameter, part, group)


@dataclass(frozen=True, slots=True)
class MuonUpdate:
    """An update on its way.

    Attributes:
        parameter: a matrix or a stack, whole or a `DTensor`.
        part: momentum of the part that this process has; plain.
        group: with the settings.
    """

    parameter: torch.Tensor
    part: torch.Tensor
    group: Group

    def _cuts(self) -> list[tuple[int, Any]]:
        """Returns the mesh dimensions over which the parameter is cut, each with torch's placement."""
        if not isinstance(self.parameter, DTensor):
            return []
        mesh = self.parameter.device_mesh
        return [(i, one) for i, one in enumerate(self.parameter.placements) if hasattr(one, "dim") and mesh.size(i) > 1]

    @property
    def is_local(self) -> bool:
        """True if this process has all of each matrix that it has a part of."""
        return all(self.parameter.ndim == 3 and placement.dim == 0 for _, placement in self._cuts())

    def find_cut(self) -> tuple[DeviceMesh, int] | None:
        """Returns the mesh and its dimension over which a matrix is cut; None if it is cut in other ways."""
        cuts = self._cuts()
        if len(cuts) != 1 or self.parameter.ndim != 2 or hasattr(cuts[0][1], "split_factor"):
            return None
        assert isinstance(self.parameter, DTensor)
        return self.parameter.device_mesh, cuts[0][0]

    @property
    def cut_dim(self) -> int:
        """The dimension in which a matrix of `find_cut` is cut."""
        return int(self._cuts()[0][1].dim)

    def compute_direction(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the orthogonalised momentum of a whole matrix or stack, in bfloat16."""
        steps = self.group["ns_steps"]
        sections: Sections | None = self.group.get(SECTIONS)
        if sections is None:
            return orthogonalized(whole, steps)
        axis, widths = sections
        return torch.cat([orthogonalized(one, steps) for one in cut(whole, widths, axis)], dim=axis)

    def apply(self, direction: torch.Tensor) -> None:
        """Moves the part of this process along its part of the direction."""
        own = local_part(self.parameter)
        rates = self._rates()
        if isinstance(rates, torch.Tensor):
            assert SECTIONS in self.group
            cuts = self._cuts()
            if cuts and cuts[0][1].dim == self.group[SECTIONS][0]:
                mesh = self.parameter.device_mesh  # type: ignore[attr-defined]
                widths = split_width(len(rates), mesh.size(cuts[0][0]))
                rates = cut(rates, widths)[mesh.get_local_rank(cuts[0][0])]
        self._move(own, direction.to(own.device), rates)

    def apply_gathered(self) -> None:
        """Moves the part of this process, for which every process gathers the whole matrix."""
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        part = self.part.to(mesh.device_type)
        whole = DTensor.from_local(
            part, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()
        step = torch.zeros_like(whole)
        self._move(step, self.compute_direction(whole), self._rates(), decay=False)
        alike = DTensor.from_local(step, mesh, [Replicate()] * mesh.ndim, run_check=False)
        own = local_part(parameter)
        own.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        own.add_(alike.redistribute(mesh, parameter.placements).to_local().to(own.device))

    def _move(
        self, own: torch.Tensor, direction: torch.Tensor, rates: float | torch.Tensor, *, decay: bool = True
    ) -> None:
        if decay:
            own.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        if isinstance(rates, torch.Tensor):
            across = rates.to(own.device).unsqueeze(1 - self.group[SECTIONS][0])
            own.sub_(direction * across)
        else:
            own.add_(direction, alpha=-rates)

    def _rates(self) -> float | torch.Tensor:
        """Returns the learning rate of the matrix, or of each index of the axis in which it has sections."""
        rate = self.group["lr"]
        rule = self.group["adjust_lr_fn"]
        shape = list(self.parameter.shape[-2:])
        sections: Sections | None = self.group.get(SECTIONS)
        if sections is None:
            return adjusted_rate(rate, rule, shape)
        axis, widths = sections
        shapes = [[*shape[:axis], width, *shape[axis + 1 :]] for width in widths]
        rates = torch.tensor([adjusted_rate(rate, rule, one) for one in shapes])
        return rates.repeat_interleave(torch.tensor(widths))


def sharded_directions(updates: Sequence[MuonUpdate], mesh: DeviceMesh, mesh_dim: int) -> list[torch.Tensor]:
    """Returns this process's part of the direction of each matrix, all of which are cut over one mesh dimension.

    Each matrix is put together by its owner, and the directions are cut again: two exchanges of all parts.
    """
    group = mesh.get_group(mesh_dim)
    num_ranks = mesh.size(mesh_dim)
    rank = mesh.get_local_rank(mesh_dim)
    owners = assign_owners([matrix.parameter.shape for matrix in updates], num_ranks)
    owned = [[i for i, owner in enumerate(owners) if owner == other] for other in range(num_ranks)]
    shapes = [part_shapes(one.parameter.shape, one.cut_dim, num_ranks) for one in updates]  # [matrix][rank]
    parts = [one.part.to(mesh.device_type, torch.bfloat16).flatten() for one in updates]
    mine = owned[rank]

    there = [torch.cat([parts[i] for i in of_owner] or [parts[0][:0]]) for of_owner in owned]
    sizes = [sum(math.prod(shapes[i][other]) for i in mine) for other in range(num_ranks)]
    arrived = all_to_all(there, sizes, group)

    pieces: list[list[torch.Tensor]] = []  # [rank][own matrix]
    for other, joined in enumerate(arrived):
        of_rank = cut(joined, [math.prod(shapes[i][other]) for i in mine])
        pieces.append([piece.view(shapes[i][other]) for i, piece in zip(mine, of_rank, strict=True)])
    back: list[list[torch.Tensor]] = [[parts[0][:0]] for _ in range(num_ranks)]
    for number, i in enumerate(mine):
        dim = updates[i].cut_dim
        direction = updates[i].compute_direction(torch.cat([of_rank[number] for of_rank in pieces], dim=dim))
        for other, piece in enumerate(cut(direction, [shape[dim] for shape in shapes[i]], dim)):
            back[other].append(piece.flatten())

    sizes = [sum(parts[i].numel() for i in of_owner) for of_owner in owned]
    results = all_to_all([torch.cat(to_rank) for to_rank in back], sizes, group)
    found: dict[int, torch.Tensor] = {}
    for of_owner, joined in zip(owned, results, strict=True):
        for i, piece in zip(of_owner, cut(joined, [parts[i].numel() for i in of_owner]), strict=True):
            found[i] = piece.view(shapes[i][rank])
    return [found[i] for i in range(len(updates))]


def assign_owners(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Returns the owner of each matrix: the largest first, each to the process with the least work so far."""
    # An iteration multiplies matrices of the shorter side, three times.
    costs = [math.prod(shape) * min(shape) for shape in shapes]
    owners = [0] * len(shapes)
    load = [0] * num_ranks
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def split_width(length: int, num_ranks: int) -> list[int]:
    """Returns how many rows each process has of a dimension that torch cuts: as `torch.chunk`, with 0 for the rest."""
    width = -(-length // num_ranks)
    return [min(width, max(0, length - width * rank)) for rank in range(num_ranks)]


def part_shapes(shape: Sequence[int], dim: int, num_ranks: int) -> list[list[int]]:
    """Returns the shape of each process's part of a matrix that is cut in a dimension."""
    return [[*shape[:dim], width, *shape[dim + 1 :]] for width in split_width(shape[dim], num_ranks)]


def all_to_all(sent: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Sends a flat tensor to each process of a group; returns the received ones, of `sizes` elements, in rank order."""
    joined = torch.cat(list(sent))
    received = joined.new_empty(sum(sizes))
    bytes_each = joined.element_size()
    dist.all_to_all_single(
        received.view(torch.uint8),  # backends support few types, and all of them this one
        joined.view(torch.uint8),
        [size * bytes_each for size in sizes],
        [one.numel() * bytes_each for one in sent],
        group=group,
    )
    return cut(received, sizes)


def cut(tensor: torch.Tensor, widths: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """Returns the pieces of a tensor, of these widths along a dimension."""
    return list(torch.split_with_sizes(tensor, list(widths), dim))


def orthogonalized(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns matrices with the same singular vectors, and singular values near 1 (about 0.7 to 1.2).

    Newton-Schulz iteration in bfloat16 (Jordan et al., 2024), as in `torch.optim.Muon`.

    Args:
        matrices: (rows, columns), or (count, rows, columns), each of which is treated for itself, in one operation.
        steps: of the iteration.

    Returns:
        bfloat16 of the same shape.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=EPS)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adjusted_rate(rate: float, rule: str, shape: Sequence[int]) -> float:
    """Returns the learning rate of a matrix of this shape (rows, columns), as torch's `adjust_lr_fn` has it."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return rate * (0.2 * math.sqrt(max(rows, columns)))
    return rate * math.sqrt(max(1, rows / columns))
