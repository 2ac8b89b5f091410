"""Pages of one group: blocks of a paged group, or slots of a state group.

Owns, for every page of its group, who uses it: requests (`refs`) and prefix-index entries (`holds`). A page is *live* while a
request uses it, *cached* while only the index holds it (freed, but findable), and *free* otherwise. Takes superpages from the
arena as needed and gives them back once empty. Knows neither tokens nor tensors; `KVCacheCoordinator` is its only caller.

A long text has thousands of blocks and a decoding request needs one at a time, so each change exists for one page and for many.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.arena import Arena, GroupPlan

#: Pages from which on array arithmetic is faster than going through them one by one.
_MANY: Final = 24


class PagePool:
    """Page ids run over the whole arena: page = superpage * pages_per_superpage + index inside it."""

    def __init__(self, group: GroupPlan, arena: Arena) -> None:
        self.group = group
        self._arena = arena
        self._per_superpage = group.pages_per_superpage
        self.num_pages = arena.num_superpages * self._per_superpage
        # Each count is one array seen twice: a memoryview for single pages, which it reads faster, and numpy's for many.
        self._refs_of, self._holds_of = np.zeros(self.num_pages, np.int32), np.zeros(self.num_pages, np.int32)
        self._live_of = np.zeros(arena.num_superpages, np.int32)
        self._refs, self._holds = self._refs_of.data, self._holds_of.data
        self._live_in = self._live_of.data  # live pages by superpage
        self._free: dict[int, list[int]] = {}  # superpage held -> its free pages
        self._partial: dict[int, None] = {}  # superpages with a free page, oldest first
        self.num_live = 0
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Free pages in superpages that this group holds already."""
        return sum(len(pages) for pages in self._free.values())

    @property
    def has_free(self) -> bool:
        return bool(self._partial)

    def superpages_with(self, num_pages: int, kept: Sequence[int] = ()) -> int:
        """Superpages with live pages once `kept`, pages that may be cached, are live and `num_pages` more are taken.

        All else that is cached is evicted by then.
        """
        pages = np.asarray(kept, np.int64)
        cached = pages[self._refs_of[pages] == 0]
        superpages = np.unique(cached // self._per_superpage)
        live = self.num_live if self._per_superpage == 1 else int(np.count_nonzero(self._live_of))
        live += int(np.count_nonzero(self._live_of[superpages] == 0))
        room = live * self._per_superpage - self.num_live - len(cached)
        return live + -(-max(0, num_pages - room) // self._per_superpage)

    # -- taking ---------------------------------------------------------------------------------------------------------

    def take_many(self, count: int, near: int | None = None) -> list[int]:
        """Up to `count` free pages with one reference each, starting in the superpage of page `near`."""
        taken: list[int] = []
        superpage = near // self._per_superpage if near is not None else None
        while len(taken) < count:
            if superpage is None or superpage not in self._partial:
                superpage = self._open()
            if superpage is None:
                break
            pages = self._free[superpage]
            more = pages[-(count - len(taken)) :]
            del pages[-len(more) :]
            if not pages:
                del self._partial[superpage]
            self._live_in[superpage] += len(more)
            taken += more[::-1]
        self._refs_of[taken] = 1
        self.num_live += len(taken)
        return taken

    def take(self, near: int | None = None) -> int | None:
        """A free page with one reference, in the superpage of page `near` if it has room; None when the arena has none left."""
        superpage = near // self._per_superpage if near is not None else None
        if superpage is None or superpage not in self._partial:
            superpage = self._open()
        if superpage is None:
            return None
        pages = self._free[superpage]
        page = pages.pop()
        if not pages:
            del self._partial[superpage]
        self._refs[page] = 1
        self._live_in[superpage] += 1
        self.num_live += 1
        return page

    def _open(self) -> int | None:
        """A superpage with a free page, of the group's own or from the arena."""
        superpage = next(iter(self._partial), None)
        if superpage is not None:
            return superpage
        superpage = self._arena.take()
        if superpage is not None:
            first = superpage * self._per_superpage
            self._free[superpage] = list(range(first + self._per_superpage - 1, first - 1, -1))
            self._partial[superpage] = None
        return superpage

    # -- requests -------------------------------------------------------------------------------------------------------

    def retain(self, page: int) -> None:
        """One more request uses this live or cached page."""
        if self._refs[page] == 0:
            self.num_cached -= 1
            self.num_live += 1
            self._live_in[page // self._per_superpage] += 1
        self._refs[page] += 1

    def retain_many(self, pages: NDArray[np.int32]) -> None:
        """The same for several pages, all different."""
        if len(pages) < _MANY:
            for page in pages.tolist():
                self.retain(page)
            return
        cached = pages[self._refs_of[pages] == 0]
        self._refs_of[pages] += 1
        self._count_live(cached, 1)
        self.num_cached -= len(cached)

    def release(self, page: int) -> bool:
        """One request fewer uses it. Returns whether no request does any more."""
        self._refs[page] -= 1
        if self._refs[page] > 0:
            return False
        self.num_live -= 1
        self._live_in[page // self._per_superpage] -= 1
        if self._holds[page]:
            self.num_cached += 1
        else:
            self._put_back(page)
        return True

    def release_many(self, pages: NDArray[np.int32]) -> None:
        """The same for several pages, all different."""
        if len(pages) < _MANY:
            for page in pages.tolist():
                self.release(page)
            return
        self._refs_of[pages] -= 1
        unused = pages[self._refs_of[pages] == 0]
        self._count_live(unused, -1)
        is_held = self._holds_of[unused] > 0
        self.num_cached += int(is_held.sum())
        self._put_back_many(unused[~is_held])

    def _count_live(self, pages: NDArray[np.int32], by: int) -> None:
        self.num_live += by * len(pages)
        superpages, counts = np.unique(pages // self._per_superpage, return_counts=True)
        self._live_of[superpages] += by * counts.astype(np.int32)

    # -- index entries --------------------------------------------------------------------------------------------------

    def hold(self, page: int) -> None:
        """One more index entry needs this live page's content."""
        self._holds[page] += 1

    def hold_many(self, pages: Sequence[int]) -> None:
        """The same for several pages, all different."""
        if len(pages) < _MANY:
            for page in pages:
                self._holds[page] += 1
        else:
            self._holds_of[np.asarray(pages)] += 1

    def drop(self, page: int) -> None:
        """One index entry fewer needs it."""
        self._holds[page] -= 1
        if self._holds[page] == 0 and self._refs[page] == 0:
            self.num_cached -= 1
            self._put_back(page)

    def drop_many(self, pages: Sequence[int]) -> None:
        """The same for several pages, all different."""
        if len(pages) < _MANY:
            for page in pages:
                self.drop(page)
            return
        them = np.asarray(pages, np.int32)
        self._holds_of[them] -= 1
        unused = them[(self._holds_of[them] == 0) & (self._refs_of[them] == 0)]
        self.num_cached -= len(unused)
        self._put_back_many(unused)

    def is_live(self, page: int) -> bool:
        return self._refs[page] > 0

    def can_empty(self, page: int) -> bool:
        """Whether evicting cached pages alone could empty this page's superpage."""
        return self._live_in[page // self._per_superpage] == 0

    # -- giving back ----------------------------------------------------------------------------------------------------

    def _put_back(self, page: int) -> None:
        superpage = page // self._per_superpage
        pages = self._free[superpage]
        pages.append(page)
        self._partial[superpage] = None
        if len(pages) == self._per_superpage:
            self._close(superpage)

    def _put_back_many(self, pages: NDArray[np.int32]) -> None:
        superpages = pages // self._per_superpage
        order = np.argsort(superpages, kind="stable")[::-1]
        starts = np.flatnonzero(np.diff(superpages[order], prepend=-1))
        for mine in np.split(pages[order], starts[1:]) if len(pages) else ():
            superpage = int(mine[0]) // self._per_superpage
            free = self._free[superpage]
            free += mine.tolist()
            self._partial[superpage] = None
            if len(free) == self._per_superpage:
                self._close(superpage)

    def _close(self, superpage: int) -> None:
        """Give an empty superpage back to the arena."""
        del self._free[superpage], self._partial[superpage]
        self._arena.give(superpage)

    def superpages(self) -> set[int]:
        """Superpages that this group holds."""
        return set(self._free)

    def check(self, refs: dict[int, int], holds: dict[int, int]) -> None:
        """Compare with the references and holds that the caller counted. AssertionError tells the page that differs."""
        live = set(np.flatnonzero(self._refs_of).tolist())
        held = set(np.flatnonzero(self._holds_of).tolist())
        for page in live | held | set(refs) | set(holds):
            assert self._refs[page] == refs.get(page, 0), (
                f"group {self.group.index} page {page}: {self._refs[page]} refs, used by {refs.get(page, 0)}"
            )
            assert self._holds[page] == holds.get(page, 0), (
                f"group {self.group.index} page {page}: {self._holds[page]} holds, in {holds.get(page, 0)} entries"
            )
        free = {page for pages in self._free.values() for page in pages}
        owned = {s * self._per_superpage + i for s in self._free for i in range(self._per_superpage)}
        assert not free & (live | held), f"group {self.group.index}: pages {sorted(free & (live | held))} are free and used"
        assert free | live | held == owned, f"group {self.group.index}: pages {sorted(owned - free - live - held)} are lost"
        assert sum(len(pages) for pages in self._free.values()) == len(free), f"group {self.group.index}: a page is free twice"
        assert self.num_live == len(live), f"group {self.group.index}: {self.num_live} live counted, {len(live)} are"
        assert self.num_cached == len(held - live), (
            f"group {self.group.index}: {self.num_cached} cached counted, {len(held - live)} are"
        )
        in_superpages = np.bincount([page // self._per_superpage for page in live], minlength=len(self._live_of))
        assert (in_superpages == self._live_of).all(), f"group {self.group.index}: live pages are miscounted by superpage"
        assert set(self._partial) == {s for s, pages in self._free.items() if pages}, "superpages with room are miscounted"
