"""Chooses the rows that are held out for evaluation, so that none of them is trained on in other clothes.

Rows with equal inputs stay on one side, and so do rows with the same value of `data.split_by` (a customer, a document,
a patient). With `data.stratify` each value of a column has its share among the rows held out. Where all rows differ,
and neither is set, the first rows after the shuffle are held out.

Example: 10 rows, share 0.2, so 2 are held out; c and e are the same text:

    row       a  b  c  d  e  f  g  h  i  j
    split_by  1  2  2  3  1  4  5  6  7  8
    group     A  A  A  D  A  F  G  H  I  J        a and e by split_by, b and c too, c and e by their text

A has four rows, which is too many; D and F are held out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence


def choose(
    share: float, number: int, *keys: Sequence[Hashable | None], strata: Sequence[Hashable] | None = None
) -> list[int]:
    """Returns the positions of the rows to hold out, in their order.

    Args:
        share: of the rows, from 0 to below 1; rounded down to whole rows.
        number: of rows.
        *keys: for each row, values that keep it on the side of other rows with the same one; None is like no other.
        strata: for each row, the value that is to have its share; None: no value has.

    Returns:
        At most the share, and fewer where groups are too large for the rest of it.
    """
    of_row = [None] * number if strata is None else strata
    left = _quotas(share, Counter(of_row))
    held: list[int] = []
    for group in _groups(number, keys):
        needed = Counter(of_row[place] for place in group)
        if all(count <= left[value] for value, count in needed.items()):
            left.subtract(needed)
            held += group
    return sorted(held)


def _quotas(share: float, sizes: Mapping[Hashable, int]) -> Counter[Hashable]:
    """Returns how many rows of each value are held out: its share, rounded down, and up for the largest remainders."""
    exact = {value: size * share for value, size in sizes.items()}
    quotas = Counter({value: int(part) for value, part in exact.items()})
    missing = int(sum(sizes.values()) * share) - quotas.total()
    for value in sorted(exact, key=lambda one: int(exact[one]) - exact[one])[:missing]:
        quotas[value] += 1
    return quotas


def _groups(number: int, keys: Sequence[Sequence[Hashable | None]]) -> list[list[int]]:
    """Returns the positions of the rows that belong together, in the order of their first rows."""
    parents = list(range(number))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    for values in keys:
        first: dict[Hashable, int] = {}
        for place, value in enumerate(values):
            if value is not None:
                one = root(first.setdefault(value, place))
                other = root(place)
                parents[max(one, other)] = min(one, other)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place in range(number):
        groups[root(place)].append(place)
    return list(groups.values())
