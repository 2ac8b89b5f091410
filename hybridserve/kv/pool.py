"""Pages of one group: blocks of a paged group, or slots of a state group.

Owns, for every page of its group, who uses it: requests (`refs`) and prefix-index entries (`holds`). A page is *live* while a
request uses it, *cached* while only the index holds it (freed, but findable), and *free* otherwise. Takes superpages from the
arena as needed and gives them back once empty. Knows neither tokens nor tensors; `KVCacheCoordinator` is its only caller.
"""

from hybridserve.kv.arena import Arena, GroupPlan


class PagePool:
    """Page ids run over the whole arena: page = superpage * pages_per_superpage + index inside it."""

    def __init__(self, group: GroupPlan, arena: Arena) -> None:
        self.group = group
        self._arena = arena
        self._per_superpage = group.pages_per_superpage
        num_pages = arena.num_superpages * self._per_superpage
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._holds = [0] * num_pages
        self._free: dict[int, list[int]] = {}  # superpage held -> its free pages
        self._partial: dict[int, None] = {}  # superpages with a free page, oldest first
        self._num_live_in: dict[int, int] = {}
        self.num_live = 0
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Free pages in superpages that this group holds already."""
        return sum(len(pages) for pages in self._free.values())

    @property
    def has_free(self) -> bool:
        return bool(self._partial)

    def take_many(self, count: int, near: int | None = None) -> list[int]:
        """Up to `count` free pages with one reference each, starting in the superpage of page `near`."""
        taken: list[int] = []
        while len(taken) < count:
            page = self.take(near)
            if page is None:
                break
            superpage = page // self._per_superpage
            rest = self._free[superpage]
            more = rest[max(0, len(rest) - (count - len(taken) - 1)) :][::-1]
            if more:
                del rest[len(rest) - len(more) :]
                if not rest:
                    del self._partial[superpage]
                for one in more:
                    self._refs[one] = 1
                self._num_live_in[superpage] += len(more)
                self.num_live += len(more)
            taken.append(page)
            taken += more
        return taken

    def take(self, near: int | None = None) -> int | None:
        """A free page with one reference, in the superpage of page `near` if it has room; None when the arena has none left."""
        superpage = near // self._per_superpage if near is not None else None
        if superpage is None or superpage not in self._partial:
            superpage = next(iter(self._partial), None)
        if superpage is None:
            superpage = self._arena.take()
            if superpage is None:
                return None
            first = superpage * self._per_superpage
            self._free[superpage] = list(range(first + self._per_superpage - 1, first - 1, -1))
            self._partial[superpage] = None
            self._num_live_in[superpage] = 0
        pages = self._free[superpage]
        page = pages.pop()
        if not pages:
            del self._partial[superpage]
        self._refs[page] = 1
        self._num_live_in[superpage] += 1
        self.num_live += 1
        return page

    def retain(self, page: int) -> None:
        """One more request uses this live or cached page."""
        if self._refs[page] == 0:
            self.num_cached -= 1
            self.num_live += 1
            self._num_live_in[page // self._per_superpage] += 1
        self._refs[page] += 1

    def release(self, page: int) -> bool:
        """One request fewer uses it. Returns whether no request does any more."""
        self._refs[page] -= 1
        if self._refs[page] > 0:
            return False
        self.num_live -= 1
        self._num_live_in[page // self._per_superpage] -= 1
        if self._holds[page]:
            self.num_cached += 1
        else:
            self._put_back(page)
        return True

    def hold(self, page: int) -> None:
        """One more index entry needs this live page's content."""
        self._holds[page] += 1

    def hold_many(self, pages: list[int]) -> None:
        """The same for several pages."""
        holds = self._holds
        for page in pages:
            holds[page] += 1

    def drop(self, page: int) -> None:
        """One index entry fewer needs it."""
        self._holds[page] -= 1
        if self._holds[page] == 0 and self._refs[page] == 0:
            self.num_cached -= 1
            self._put_back(page)

    def is_live(self, page: int) -> bool:
        return self._refs[page] > 0

    def can_empty(self, page: int) -> bool:
        """Whether evicting cached pages alone could empty this page's superpage."""
        return self._num_live_in[page // self._per_superpage] == 0

    def _put_back(self, page: int) -> None:
        superpage = page // self._per_superpage
        pages = self._free[superpage]
        pages.append(page)
        self._partial[superpage] = None
        if len(pages) == self._per_superpage:
            del self._free[superpage], self._partial[superpage], self._num_live_in[superpage]
            self._arena.give(superpage)

    def superpages(self) -> set[int]:
        """Superpages that this group holds."""
        return set(self._free)

    def check(self, refs: dict[int, int], holds: dict[int, int]) -> None:
        """Compare with the references and holds that the caller counted. AssertionError tells the page that differs."""
        live = {page for page, count in enumerate(self._refs) if count}
        held = {page for page, count in enumerate(self._holds) if count}
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
        assert self.num_live == len(live), f"group {self.group.index}: {self.num_live} live counted, {len(live)} are"
        assert self.num_cached == len(held - live), (
            f"group {self.group.index}: {self.num_cached} cached counted, {len(held - live)} are"
        )
        assert set(self._partial) == {s for s, pages in self._free.items() if pages}, "superpages with room are miscounted"
