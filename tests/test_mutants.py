"""The kit against seeded faults: real mixers, each made wrong in a way that others shipped (see the word "seen" of each).

A fault counts as caught when the check that is named for it fails, and passes without the fault. The last test prints the table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT, Batch, LayerCaches, PagedTable, StateTable
from hybridserve.conformance.cases import CASES
from hybridserve.conformance.conduct import check_oracle
from hybridserve.conformance.judge import judge
from hybridserve.conformance.subjects import Subject
from hybridserve.conformance.tolerance import FP32, ConformanceError
from hybridserve.kv.spec import Spec, StateSpec
from hybridserve.mixers import Mixer, mixers
from hybridserve.mixers.attention import Attention
from hybridserve.mixers.gated_delta import GatedDelta
from hybridserve.mixers.mamba2 import Mamba2
from hybridserve.mixers.short_conv import ShortConv
from tests import conformance


@dataclass(frozen=True)
class Mutant:
    """A faulty layer, the case of the kit that it is made from, the check that must find it, and how it was seen elsewhere."""

    layer: type[Mixer]
    kind: str
    case: int
    check: str
    seen: str


MUTANTS: dict[str, Mutant] = {}


def mutant(check: str, seen: str, case: int = 0) -> Callable[[type[Mixer]], type[Mixer]]:
    """Put a faulty subclass of a built-in layer into the table."""

    def add(layer: type[Mixer]) -> type[Mixer]:
        MUTANTS[layer.__name__] = Mutant(layer, layer.kind, case, check, seen)
        return layer

    return add


# --- what faults are made of ---


def with_states(batch: Batch, change: Callable[[StateTable], StateTable]) -> Batch:
    return replace(batch, states={group: change(table) for group, table in batch.states.items()})


def with_starts(batch: Batch, starts: Callable[[Tensor], Tensor]) -> Batch:
    def change(table: StateTable) -> StateTable:
        slots = starts(table.start_slots)
        return replace(table, start_slots=slots, starts_host=tuple(slots.tolist()))

    return with_states(batch, change)


def alone(batch: Batch, s: int, padding: int = 0) -> Batch:
    """Sequence s as a batch of its own; with `padding`, so many rows longer, and its last state is that of the last of them."""
    first, stop = batch.cu_seqlens_host[s : s + 2]
    length, kv_len = stop - first + padding, batch.kv_lens_host[s] + padding
    states = {}
    for group, table in batch.states.items():
        mine = [i for i, row in enumerate(table.write_rows_host) if first <= row < stop]
        rows = [table.write_rows_host[i] - first for i in mine]
        rows = [length - 1 if row == stop - first - 1 else row for row in rows]
        start = table.starts_host[s]
        states[group] = StateTable(
            torch.tensor([start]), torch.tensor(rows, dtype=torch.int64), table.write_slots[mine], tuple(rows), (start,)
        )
    return Batch(
        input_ids=torch.zeros(length, dtype=torch.int64),
        positions=torch.arange(kv_len - length, kv_len),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([kv_len], dtype=torch.int32),
        cu_seqlens_host=(0, length),
        kv_lens_host=(kv_len,),
        paged={
            group: PagedTable(table.block_tables[s : s + 1], table.kv_index[first:stop], table.block_size)
            for group, table in batch.paged.items()
        },
        states=states,
    )


def lengths_of(batch: Batch) -> list[int]:
    return [stop - start for start, stop in zip(batch.cu_seqlens_host, batch.cu_seqlens_host[1:], strict=False)]


def written_slots(batch: Batch) -> Tensor:
    (table,) = batch.states.values()
    return table.write_slots


class Delta(GatedDelta):
    """Base of faults of the gated delta rule: `forward` is the right one."""

    def right(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        return GatedDelta.forward(self, x, batch, caches)


# --- where a sequence starts ---


@mutant("starts", "a fresh sequence reads its slot: stale state, poison (I5)")
class FreshReadsSlot(Delta):
    def forward(self, x, batch, caches):
        return self.right(x, with_starts(batch, lambda slots: torch.where(slots == NO_SLOT, 2, slots)), caches)


@mutant("starts", "a first chunk of one row is taken for a decode (I5)")
class FirstRowTakenForDecode(Delta):
    def forward(self, x, batch, caches):
        if batch.max_rows == 1:
            batch = with_starts(batch, lambda slots: torch.where(slots == NO_SLOT, written_slots(batch)[: len(slots)], slots))
        return self.right(x, batch, caches)


@mutant("chunking", "the second chunk ignores the first's state (I6)")
class SecondChunkStartsAnew(Delta):
    def forward(self, x, batch, caches):
        return self.right(x, with_starts(batch, lambda slots: torch.full_like(slots, NO_SLOT)), caches)


@mutant("resume", "the initial state is dropped when the batch is 1 (I7)")
class BatchOfOneStartsAnew(Delta):
    def forward(self, x, batch, caches):
        drop = batch.num_sequences == 1 and batch.max_rows > 1
        return self.right(x, with_starts(batch, lambda s: torch.full_like(s, NO_SLOT) if drop else s), caches)


@mutant("batching", "a decode beside a prefill is given the prefill's zero state (I7)")
class MixedBatchStartsAnew(Delta):
    def forward(self, x, batch, caches):
        drop = batch.max_rows > 1 and any(start == NO_SLOT for start in next(iter(batch.states.values())).starts_host)
        return self.right(x, with_starts(batch, lambda s: torch.full_like(s, NO_SLOT) if drop else s), caches)


@mutant("starts", "slots are looked up by place in the batch instead of by index (I3)")
class SlotByPlace(Delta):
    def forward(self, x, batch, caches):
        return self.right(x, with_starts(batch, lambda s: torch.where(s == NO_SLOT, s, torch.arange(len(s)))), caches)


# --- where a state goes ---


@mutant("written_states", "a checkpoint is one token short of its prefix (I2)")
class StateOffByOneRow(Delta):
    def forward(self, x, batch, caches):
        def change(table: StateTable) -> StateTable:
            rows = (table.write_rows - 1).clamp(min=0)
            return replace(table, write_rows=rows, write_rows_host=tuple(rows.tolist()))

        return self.right(x, with_states(batch, change), caches)


@mutant("written_states", "checkpoints inside a prompt all hold the state of its end (I2)")
class CheckpointIsTheEnd(Delta):
    def forward(self, x, batch, caches):
        def change(table: StateTable) -> StateTable:
            rows = batch.cu_seqlens[1:].long()[torch.bucketize(table.write_rows, batch.cu_seqlens[1:].long(), right=True)] - 1
            return replace(table, write_rows=rows, write_rows_host=tuple(rows.tolist()))

        return self.right(x, with_states(batch, change), caches)


@mutant("slots", "a hit updates the shared state in place: the next hit reads another's text (I4, R11)")
class WritesItsStart(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        (cache,), (table,) = caches.values(), batch.states.values()
        live = (table.start_slots != NO_SLOT).nonzero().flatten()
        live = live[: len(table.write_slots)]
        for pool in cache.tensors.values():
            pool[table.start_slots[live]] = pool[table.write_slots[live]]
        return y


@mutant("slots", "a write lands in the neighbour's slot as well")
class WritesNeighbour(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        for pool in caches["state"].tensors.values():
            pool[(written_slots(batch) + 1) % len(pool)] = 0
        return y


@mutant("crossing_slots", "sequences run one after the other: a slot is overwritten before it is read")
class WritesBeforeReads(Delta):
    def forward(self, x, batch, caches):
        rows = x.split(lengths_of(batch))
        return torch.cat([self.right(part, alone(batch, s), caches) for s, part in enumerate(rows)])


@mutant("rollback", "a verification updates the state, so refused drafts stay in it")
class VerificationWrites(Delta):
    def forward(self, x, batch, caches):
        def change(table: StateTable) -> StateTable:
            live = [s for s, slot in enumerate(table.starts_host) if slot != NO_SLOT]
            if table.write_rows_host or not live:
                return table
            rows = batch.cu_seqlens[1:].long()[live] - 1
            slots = table.start_slots[live]
            return replace(table, write_rows=rows, write_rows_host=tuple(rows.tolist()), write_slots=slots)

        return self.right(x, with_states(batch, change), caches)


@mutant("chunking", "padding tokens update the recurrent state (I8)")
class PaddingUpdatesState(Delta):
    def forward(self, x, batch, caches):
        out = []
        for s, part in enumerate(x.split(lengths_of(batch))):
            padding = -len(part) % 4
            padded = torch.cat((part, part.new_zeros(padding, part.shape[1])))
            out.append(self.right(padded, alone(batch, s, padding), caches)[: len(part)])
        return torch.cat(out)


# --- what a state holds ---


@mutant("chunking", "decay is summed from the start of a tile: what came before it decays too little (I6)")
class DecayFromTileStart(Mamba2):
    def _time_step(self, dt):
        dt, log_decay = Mamba2._time_step(self, dt)
        if len(dt) > 64:
            log_decay = log_decay.clone()
            log_decay[64::64] = 0
        return dt, log_decay


@mutant("chunking", "prefill and decode lay the state out in different ways", case=1)
class PrefillTransposesState(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        if batch.max_rows > 1:
            pool, slots = caches["state"].tensors["recurrent"], written_slots(batch)
            pool[slots] = pool[slots].mT.contiguous()
        return y


@mutant("chunking", "the state is kept in a coarser dtype than the arithmetic's")
class StateRounded(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        pool, slots = caches["state"].tensors["recurrent"], written_slots(batch)
        pool[slots] = pool[slots].bfloat16().float()
        return y


@mutant("bfloat16", "in bfloat16 the memory is bfloat16 too: it drifts token by token")
class MemoryFollowsTheModel(Mamba2):
    def forward(self, x, batch, caches):
        y = Mamba2.forward(self, x, batch, caches)
        if self.dtype == torch.bfloat16:
            pool, slots = caches["state"].tensors["ssm"], written_slots(batch)
            pool[slots] = pool[slots].bfloat16().float()
        return y


@mutant("chunking", "the convolution's window is one input short")
class WindowOneShort(ShortConv):
    def forward(self, x, batch, caches):
        y = ShortConv.forward(self, x, batch, caches)
        caches["state"].tensors["conv"][written_slots(batch), 0] = 0
        return y


@mutant("chunking", "a chunk shorter than the convolution forgets the inputs before it (I6)", case=1)
class ShortChunkForgets(ShortConv):
    def forward(self, x, batch, caches):
        y = ShortConv.forward(self, x, batch, caches)
        pool = caches["state"].tensors["conv"]
        if batch.max_rows < pool.shape[1]:
            pool[written_slots(batch), : pool.shape[1] - batch.max_rows] = 0
        return y


@mutant("specs", "a tensor is declared that nobody writes: its bytes are paid for, and copied, for nothing")
class DeclaresTooMuch(Delta):
    def specs(self) -> dict[str, Spec]:
        (spec,) = super().specs().values()
        return {"state": StateSpec((*spec.tensors, replace(spec.tensors[1], name="spare")))}


@mutant("step", "a long chunk goes to another kernel than a short one, which rounds its decay in another place")
class LongChunkOfAnotherKernel(Delta):
    def _gates(self, x):
        log_decay, beta = GatedDelta._gates(self, x)
        return (log_decay.bfloat16().float(), beta) if len(x) > 16 else (log_decay, beta)


@mutant("resume", "state is kept in the layer between calls instead of in its cache (I4)")
class KeepsItsOwnState(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        if batch.num_sequences == 1 and batch.kv_lens_host[0] > len(x):
            y = y + 0.1 * self.last
        self.last = y[-1].clone()
        return y

    last: Tensor | float = 0.0


# --- attention ---


@mutant("window", "a window one token too wide reads a block that was given back", case=1)
class WindowOffByOne(Attention):
    def attend(self, q, x, batch, caches):
        cache, config = caches["kv"], self.config
        table = batch.paged[cache.group]
        return self.ops.paged_attention(
            q, cache.tensors["k"], cache.tensors["v"], batch, table, scale=self.scale,
            window=config.window + 1, softcap=config.softcap, sinks=self.sinks,
        )  # fmt: skip


@mutant("chunking", "positions begin anew with each chunk")
class PositionsOfTheChunk(Attention):
    def forward(self, x, batch, caches):
        positions = torch.cat([torch.arange(n) for n in lengths_of(batch)])
        return Attention.forward(self, x, replace(batch, positions=positions), caches)


@mutant("chunking", "the causal mask is aligned to the chunk's first row instead of its last (I6)")
class MaskFromTheTop(Attention):
    def attend(self, q, x, batch, caches):
        y = Attention.attend(self, q, x, batch, caches)
        if batch.num_sequences == 1 and batch.kv_lens_host[0] > len(x) > 1:
            short = replace(batch, kv_lens=torch.tensor([len(x)], dtype=torch.int32), kv_lens_host=(len(x),))
            y = Attention.attend(self, q, x, replace(short, positions=torch.arange(len(x))), caches)
        return y


@mutant("batching", "every sequence is read to the length of the longest (I7)")
class LengthOfTheLongest(Attention):
    def attend(self, q, x, batch, caches):
        longest = max(batch.kv_lens_host)
        tables = {group: replace(t, block_tables=t.block_tables.clamp(max=95)) for group, t in batch.paged.items()}
        lens = (longest,) * batch.num_sequences
        wrong = replace(batch, kv_lens=torch.tensor(lens, dtype=torch.int32), kv_lens_host=lens, paged=tables)
        return Attention.attend(self, q, x, wrong, caches)


@mutant("chunking", "a chunk that crosses a block's end is written behind its first block (I6)")
class ChunkStaysInItsBlock(Attention):
    def forward(self, x, batch, caches):
        (group, table), size = next(iter(batch.paged.items())), next(iter(batch.paged.values())).block_size
        first = table.kv_index[0] // size * size
        index = torch.where(torch.tensor(batch.num_sequences == 1), first + table.kv_index % size, table.kv_index)
        return Attention.forward(self, x, replace(batch, paged={group: replace(table, kv_index=index)}), caches)


@mutant("entries", "a whole block is written where a few tokens of it are new")
class WritesWholeBlock(Attention):
    def forward(self, x, batch, caches):
        (table,) = batch.paged.values()
        v = caches["kv"].tensors["v"]
        following = table.kv_index[-1] + 1
        if following % table.block_size:
            v[following // table.block_size, following % table.block_size] = 0
        return Attention.forward(self, x, batch, caches)


@mutant("padding", "offsets are computed from shapes, so pages that lie apart are written between (I20)")
class OffsetsFromShapes(Attention):
    def forward(self, x, batch, caches):
        y = Attention.forward(self, x, batch, caches)
        (table,) = batch.paged.values()
        v = caches["kv"].tensors["v"]
        packed = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride(), v.storage_offset())
        block, offset = divmod(int(table.kv_index[-1]), table.block_size)
        packed[block, offset] = v[block, offset].clone()
        return y


@mutant("offsets", "an offset of 32 bits wraps: plausible numbers from another page (I20)")
class OffsetOf32Bits(Attention):
    def forward(self, x, batch, caches):
        stride = caches["kv"].tensors["k"].stride(0)
        group, table = next(iter(batch.paged.items()))
        tables = torch.where(table.block_tables.long() * stride >= 2**31, 0, table.block_tables)
        block, offset = table.kv_index // table.block_size, table.kv_index % table.block_size
        index = torch.where(block * stride >= 2**31, offset, table.kv_index)
        wrong = replace(table, block_tables=tables, kv_index=index)
        return Attention.forward(self, x, replace(batch, paged={group: wrong}), caches)


# --- what shows only at size ---


def drop_starts(batch: Batch, when: bool) -> Batch:
    return with_starts(batch, lambda s: torch.full_like(s, NO_SLOT) if when else s)


@mutant("many_sequences", "a decode table has room for eight sequences: later ones start anew")
class NinthDecodeStartsAnew(Delta):
    def forward(self, x, batch, caches):
        late = batch.max_rows == 1 and batch.num_sequences > 8
        keep = torch.arange(batch.num_sequences) < 8
        return self.right(x, with_starts(batch, lambda s: torch.where(keep, s, NO_SLOT)) if late else batch, caches)


@mutant("many_sequences", "checkpoints of neighbours are swapped in a wide batch (I2)")
class CheckpointOfAnother(Delta):
    def forward(self, x, batch, caches):
        def change(table: StateTable) -> StateTable:
            slots = table.write_slots.clone()
            if batch.num_sequences > 8:
                slots[[-2, -4]] = slots[[-4, -2]]
            return replace(table, write_slots=slots)

        return self.right(x, with_states(batch, change), caches)


@mutant("long_text", "a checkpoint inside a long pass is one row early (I2)")
class LongCheckpointEarly(Delta):
    def forward(self, x, batch, caches):
        def change(table: StateTable) -> StateTable:
            last = batch.num_tokens - 1
            early = (table.write_rows > 64) & (table.write_rows < last)
            rows = torch.where(early, table.write_rows - 1, table.write_rows)
            return replace(table, write_rows=rows, write_rows_host=tuple(rows.tolist()))

        return self.right(x, with_states(batch, change), caches)


@mutant("long_text", "a long chunk that is not the first starts anew (I6)")
class LongLaterChunkStartsAnew(Delta):
    def forward(self, x, batch, caches):
        return self.right(x, drop_starts(batch, batch.max_rows > 70), caches)


@mutant("long_text", "a block table has 32 places")
class ThirtyTwoBlocks(Attention):
    def forward(self, x, batch, caches):
        tables = {}
        for group, table in batch.paged.items():
            blocks = table.block_tables.clone()
            blocks[:, 32:] = blocks[:, 31:32]
            tables[group] = replace(table, block_tables=blocks)
        return Attention.forward(self, x, replace(batch, paged=tables), caches)


@mutant("long_text", "blocks are taken to have four tokens whatever the table says (I3)")
class BlocksOfFour(Attention):
    def forward(self, x, batch, caches):
        ((group, table),) = batch.paged.items()
        offset = table.kv_index % table.block_size
        wrong = replace(table, kv_index=table.kv_index - offset + offset % 4)
        return Attention.forward(self, x, replace(batch, paged={group: wrong}), caches)


@mutant("far_positions", "positions are counted in bfloat16: beyond 256 neighbours are equal")
class PositionsInBfloat16(Attention):
    def forward(self, x, batch, caches):
        return Attention.forward(self, x, replace(batch, positions=batch.positions.bfloat16().long()), caches)


@mutant("far_positions", "positions are cut off at the end of a table")
class PositionsClamped(Attention):
    def forward(self, x, batch, caches):
        return Attention.forward(self, x, replace(batch, positions=batch.positions.clamp(max=4095)), caches)


@mutant("twins", "what is kept for a pass has no key of the layer: the second layer takes the first one's projection")
class SharesProjections(Delta):
    def forward(self, x, batch, caches):
        (y,) = batch.derived.setdefault("mixed", (self.right(x, batch, caches),))
        return y


@mutant("alternating_users", "the last decode's state stays in the layer, found by the length of the text (R11)")
class RemembersByLength(Delta):
    def forward(self, x, batch, caches):
        y = self.right(x, batch, caches)
        if batch.num_sequences == 1 and batch.max_rows == 1:
            y = self.kept.setdefault(batch.kv_lens_host[0], y.clone())
        return y

    def __init__(self, config, ops, dtype):
        super().__init__(config, ops, dtype)
        self.kept: dict[int, Tensor] = {}


@mutant("extreme_gates", "a decay of nothing left is divided by: NaN where a gate forgets all at once")
class DividesByDecay(Delta):
    def _gates(self, x):
        log_decay, beta = GatedDelta._gates(self, x)
        decay = log_decay.exp()
        return log_decay, beta * (decay / decay)


@mutant("float16", "a constant is beyond what float16 holds")
class OverflowsInFloat16(Attention):
    def forward(self, x, batch, caches):
        return Attention.forward(self, x * 70000.0 * (1 / 70000.0) if self.dtype != torch.float16 else x * 70000.0, batch, caches)


@mutant("repeats", "one run in five adds up in another order")
class DiffersOnceInFive(Attention):
    def forward(self, x, batch, caches):
        self.runs += 1
        y = Attention.forward(self, x, batch, caches)
        return y * (1 + 1e-6) if self.runs % 15 == 0 else y

    runs = 0


# --- what is computed ---


@mutant("oracle", "value heads are given their key heads in the wrong order where there are more of them")
class HeadsTiled(Delta):
    def _heads(self, qkv):
        q, k, v = GatedDelta._heads(self, qkv)
        return q, k, torch.cat((v[:, ::2], v[:, 1::2]), 1)


@mutant("oracle", "the output gate is left out")
class NoGate(Attention):
    def _query_and_gate(self, x):
        return Attention._query_and_gate(self, x)[0], None


@mutant("oracle", "the skip connection D is left out")
class NoSkip(Mamba2):
    def forward(self, x, batch, caches):
        kept, self.D.data = self.D.data, torch.zeros_like(self.D)
        try:
            return Mamba2.forward(self, x, batch, caches)
        finally:
            self.D.data = kept


@mutant("oracle", "a convolution of width W is run with the weights in reverse")
class TapsReversed(ShortConv):
    def _taps(self) -> None:
        self.conv.weight.data = self.conv.weight.data.flip(1)

    def forward(self, x, batch, caches):
        self._taps()
        try:
            return ShortConv.forward(self, x, batch, caches)
        finally:
            self._taps()


# --- conduct ---


@mutant("global_state", "random numbers of the process are used: runs differ, and seeds of others shift")
class UsesGlobalRandom(Attention):
    def forward(self, x, batch, caches):
        return Attention.forward(self, x, batch, caches) + 1e-7 * torch.rand(1)


@mutant("global_state", "the input, which is the residual stream, is changed in place")
class ChangesItsInput(Attention):
    def forward(self, x, batch, caches):
        y = Attention.forward(self, x, batch, caches)
        x.mul_(1.001)
        return y


@mutant("meta", "a table of constants is a buffer on the default device, and empty once weights are read")
class BufferOnTheDefaultDevice(Attention):
    def __init__(self, config, ops, dtype):
        super().__init__(config, ops, dtype)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


@mutant("serialise", "a constant drawn at start-up is not among the parameters")
class ConstantNotSaved(Attention):
    def __init__(self, config, ops, dtype):
        super().__init__(config, ops, dtype)
        ConstantNotSaved.built += 1
        self.factor = 1 + 1e-3 * ConstantNotSaved.built

    built = 0

    def forward(self, x, batch, caches):
        return Attention.forward(self, x * self.factor, batch, caches)


# --- the tests ---


def subject_of(mutant: Mutant, layer: type[Mixer]) -> Subject:
    case = CASES[mutant.kind][mutant.case]
    return Subject(mutant.kind, layer, case.config, case.oracle)


def fails(mutant: Mutant, layer: type[Mixer]) -> bool:
    """Whether the check that is named for a fault finds one in this layer."""
    subject = subject_of(mutant, layer)
    try:
        if mutant.check == "oracle":
            check_oracle(subject.build(), subject.oracle, FP32)
        else:
            getattr(conformance, f"check_{mutant.check}")(subject.build(), FP32)
    except ConformanceError:
        return True
    return False


@functools.cache
def is_caught(name: str) -> bool:
    return fails(MUTANTS[name], MUTANTS[name].layer)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_kit_catches_a_seeded_fault(name: str) -> None:
    assert is_caught(name), f"{name} passes {MUTANTS[name].check}: {MUTANTS[name].seen}"
    assert not fails(MUTANTS[name], mixers[MUTANTS[name].kind]), "the check fails without the fault as well"


def test_all_are_caught_and_the_table_says_by_what(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(name, m.kind, m.check, "caught" if is_caught(name) else "MISSED", m.seen) for name, m in MUTANTS.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    with capsys.disabled():
        print()
        for *cells, seen in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), seen, sep="  ")
    assert len(rows) >= 15
    assert all(row[3] == "caught" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_whole_run_fails_with_the_check_and_what_came_out(name: str) -> None:
    mutant = MUTANTS[name]
    report = judge(subject_of(mutant, mutant.layer))
    assert report.verdict == "failed"
    assert all(outcome.detail for outcome in report.failed)
