"""Groups of groups: how a stage with more peers than one group holds still ends on the exact sum. Pure.

Members stand on a full grid, filled row by row (Moshpit SGD, arXiv 2103.03239, section 3.2): at level k those that differ
in coordinate k alone sum, so after all levels everyone on it holds the sum of all, added in one order. Members beyond the
largest such grid first hand what they have to one on it, and get the result from it last: an exact tree around the grid.
Everyone computes the same groups, so all end on the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement

#: (level, members of the group in ascending order, whether this member adds what it holds)
Level = tuple[int, tuple[int, ...], bool]


@cache
def grid_of(num_members: int, max_group: int) -> tuple[int, ...]:
    """The sides, each at most `max_group`, of the largest grid of at most `num_members`; it has the fewest levels.

    Raises:
        ValueError: groups of one would never end.
    """
    if max_group < 2:
        raise ValueError(f"a group of {max_group} sums nothing")
    if num_members <= max_group:
        return (num_members,)
    dimension = 1
    while max_group**dimension < num_members:
        dimension += 1
    grids = (
        sides
        for d in (dimension - 1, dimension)
        for sides in combinations_with_replacement(range(max_group, 1, -1), d)
        if math.prod(sides) <= num_members
    )
    return max(grids, key=lambda sides: (math.prod(sides), -max(sides)))


def num_levels(num_members: int, max_group: int) -> int:
    """The number of exchanges, those of members beyond the grid included."""
    return 1 if num_members <= max_group else len(grid_of(num_members, max_group)) + 2


def groups_of(num_members: int, me: int, max_group: int) -> Iterator[Level]:
    """The exchanges that member `me` takes part in, in their order."""
    sides = grid_of(num_members, max_group)
    if len(sides) == 1 and sides[0] == num_members:
        yield 0, tuple(range(num_members)), True
        return
    size = math.prod(sides)
    keeper = me % size
    guests = tuple(range(size + keeper, num_members, size))
    if guests:
        yield 0, (keeper, *guests), True
    if me < size:
        stride = 1
        for coordinate, side in enumerate(sides):
            first = me - me // stride % side * stride
            yield 1 + coordinate, tuple(first + place * stride for place in range(side)), True
            stride *= side
    if guests:
        yield len(sides) + 1, (keeper, *guests), me == keeper
