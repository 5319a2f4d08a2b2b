"""Groups: ordered ranks of COMM_WORLD, of which communicators are made."""

from __future__ import annotations

from collections.abc import Sequence

from alltoallv.errors import InvalidParamError
from alltoallv.mpi.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL


class Group:
    """Ranks in an order; ``own`` is this process's rank in COMM_WORLD."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self._ranks, self._own = list(ranks), own

    def Get_size(self) -> int:
        return len(self._ranks)

    def Get_rank(self) -> int:
        """Returns this process's rank in the group, or UNDEFINED."""
        return self._ranks.index(self._own) if self._own in self._ranks else UNDEFINED

    size, rank = property(Get_size), property(Get_rank)

    def _chosen(self, ranks: Sequence[int]) -> list[int]:
        if any(not 0 <= rank < len(self._ranks) for rank in ranks) or len(set(ranks)) != len(ranks):
            raise InvalidParamError(
                f"ranks is {list(ranks)}, expected different ranks below {len(self._ranks)}", id=1385
            )
        return [self._ranks[rank] for rank in ranks]

    def Incl(self, ranks: Sequence[int]) -> Group:
        return Group(self._chosen(ranks), self._own)

    def Excl(self, ranks: Sequence[int]) -> Group:
        out = set(self._chosen(ranks))
        return Group([rank for rank in self._ranks if rank not in out], self._own)

    def Range_incl(self, ranks: Sequence[Sequence[int]]) -> Group:
        return self.Incl(_in_ranges(ranks))

    def Range_excl(self, ranks: Sequence[Sequence[int]]) -> Group:
        return self.Excl(_in_ranges(ranks))

    def Union(self, group: Group) -> Group:
        more = [rank for rank in group._ranks if rank not in self._ranks]
        return Group(self._ranks + more, self._own)

    def Intersection(self, group: Group) -> Group:
        return Group([rank for rank in self._ranks if rank in group._ranks], self._own)

    Intersect = Intersection

    def Difference(self, group: Group) -> Group:
        return Group([rank for rank in self._ranks if rank not in group._ranks], self._own)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """Returns the ranks that these have in another group, UNDEFINED where they are not in it."""
        there = self._ranks if group is None else group._ranks
        own = range(len(self._ranks)) if ranks is None else ranks
        if any(rank != PROC_NULL and not 0 <= rank < len(self._ranks) for rank in own):
            raise InvalidParamError(f"ranks is {list(own)}, expected ranks below {len(self._ranks)}", id=1386)
        positions = {rank: position for position, rank in enumerate(there)}
        return [PROC_NULL if j == PROC_NULL else positions.get(self._ranks[j], UNDEFINED) for j in own]

    def Compare(self, group: Group) -> int:
        if self._ranks == group._ranks:
            return IDENT
        return SIMILAR if sorted(self._ranks) == sorted(group._ranks) else UNEQUAL

    def Dup(self) -> Group:
        return Group(self._ranks, self._own)

    def Free(self) -> None:
        """Holds nothing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._ranks == other._ranks

    __hash__ = object.__hash__


def _in_ranges(ranges: Sequence[Sequence[int]]) -> list[int]:
    return [rank for first, last, step in ranges for rank in range(first, last + (1 if step > 0 else -1), step)]


GROUP_EMPTY, GROUP_NULL = Group([], -1), Group([], -1)
