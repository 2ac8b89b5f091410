"""The CPU's operations on the native kernels and on plain torch, beside what the machine could do.

    python -m benchmarks.ops [--threads N] [--only linear] [--rounds 9] [--json FILE]

Both backends run alternately and the medians are printed, with the floor of each case: the time to read and write its bytes once,
or to do its arithmetic, whichever is longer, at rates that are measured first. Shapes are those of Qwen3.5-0.8B; of operations
that it has not, those of GLM-5.3-Flash, Qwen3.8-Flash-Next and Falcon-Mamba-7B.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import floors
from hybridserve.backends import cpu, reference
from hybridserve.backends.offer import Operation
from hybridserve.batch import Batch, PagedTable, StateTable

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
#: Copies of weights that are used in turn, so that none is still in the cache.
NUM_COPIES = 8


@dataclass(frozen=True)
class Case:
    """One call of an operation, to be made again and again."""

    name: str
    operation: str
    run: Callable[[Operation], object]
    nbytes: float  # read and written at least
    flop: float

    def floor_s(self, rates: floors.Rates) -> float:
        return max(self.nbytes / rates.read_nbytes_per_s, self.flop / rates.fp32_flop_per_s)


def make_batch(rows: list[int], context: int = 0) -> tuple[Batch, StateTable, PagedTable]:
    """Sequences with some rows each after `context` tokens, each with a slot of its own and blocks in random order."""
    cu_seqlens = (0, *itertools.accumulate(rows))
    kv_lens = tuple(context + count for count in rows)
    last = tuple(end - 1 for end in cu_seqlens[1:])
    slots = torch.arange(len(rows))
    width = -(-max(kv_lens) // BLOCK_SIZE)
    blocks = torch.randperm(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    batch = Batch(
        input_ids=torch.zeros(cu_seqlens[-1], dtype=torch.int64),
        positions=torch.cat([torch.arange(context, context + count) for count in rows]),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_host=cu_seqlens,
        kv_lens_host=kv_lens,
        paged={},
        states={},
    )
    states = StateTable(slots, torch.tensor(last), slots, last, tuple(range(len(rows))))
    return batch, states, PagedTable(blocks, torch.zeros(cu_seqlens[-1], dtype=torch.int64), BLOCK_SIZE)


def linear_cases() -> Iterator[Case]:
    size_in, size_out = 1024, 3584
    weights = itertools.cycle([torch.randn(size_out, size_in).to(DTYPE) for _ in range(NUM_COPIES)])
    for rows in (1, 4, 8, 16, 32, 64, 256):
        x = torch.randn(rows, size_in).to(DTYPE)
        nbytes, flop = 2 * size_in * size_out, 2 * rows * size_in * size_out
        yield Case(f"{rows} rows", "linear", lambda op, x=x: op(x, next(weights), None), nbytes, flop)


def head_linear_cases() -> Iterator[Case]:
    """GLM-5.3-Flash: queries into the space of latents, by the keys' half of the up-projection."""
    heads, size_in, size_out = 64, 256, 512
    weight = torch.randn(heads, 2 * size_in, size_out).to(DTYPE)[:, :size_in].mT
    for rows in (1, 8, 256):
        x = torch.randn(rows, heads, size_in).to(DTYPE)
        yield Case(f"{rows} rows", "head_linear", lambda op, x=x: op(x, weight), 2 * weight.numel(), 2 * rows * weight.numel())


def delta_rule_cases() -> Iterator[Case]:
    heads, size = 16, 128
    for name, rows in (("decode 1", [1]), ("decode 8", [1] * 8), ("prefill 512", [512])):
        batch, table, _ = make_batch(rows)
        q, k, v = (torch.randn(sum(rows), heads, size).to(DTYPE) for _ in range(3))
        log_decay, beta = -torch.rand(sum(rows), heads), torch.rand(sum(rows), heads)
        state = torch.zeros(len(rows), heads, size, size)

        def run(op: Operation, rows=(q, k, v, log_decay, beta), state=state, batch=batch, table=table) -> object:
            return op(*rows, state, batch, table, scale=size**-0.5, qk_l2norm=True)

        yield Case(name, "delta_rule", run, 2 * state.nbytes, 7 * sum(rows) * heads * size * size)


def attention_cases() -> Iterator[Case]:
    heads, key_heads, size = 8, 2, 256
    situations = (("decode 8, 1024 tokens", [1] * 8, 1023), ("decode 1, 4096 tokens", [1], 4095), ("prefill 512", [512], 0))
    for name, rows, context in (*situations, ("prefill 256 after 768", [256], 768)):
        batch, _, table = make_batch(rows, context)
        caches = [torch.randn(table.block_tables.numel(), BLOCK_SIZE, key_heads, size).to(DTYPE) for _ in range(2)]
        q = torch.randn(sum(rows), heads, size).to(DTYPE)

        def run(op: Operation, q=q, caches=caches, batch=batch, table=table) -> object:
            return op(q, *caches, batch, table, scale=size**-0.5)

        pairs = sum(count * (context + (count + 1) / 2) for count in rows)
        yield Case(name, "paged_attention", run, sum(cache.nbytes for cache in caches), 4 * pairs * heads * size)


def conv_cases() -> Iterator[Case]:
    channels, width = 6144, 4
    weight = torch.randn(channels, width).to(DTYPE)
    for name, rows in (("decode 8", [1] * 8), ("prefill 1024", [1024])):
        batch, table, _ = make_batch(rows)
        x, window = torch.randn(sum(rows), channels).to(DTYPE), torch.zeros(len(rows), width - 1, channels, dtype=DTYPE)

        def run(op: Operation, x=x, window=window, batch=batch, table=table) -> object:
            return op(x, weight, None, window, batch, table, activation="silu")

        yield Case(name, "short_conv", run, 2 * (x.nbytes + window.nbytes), 2 * x.numel() * width)


def moe_cases() -> Iterator[Case]:
    experts, size, inner, choices = 64, 1024, 512, 8
    gate_up, down = torch.randn(experts, 2 * inner, size).to(DTYPE), torch.randn(experts, size, inner).to(DTYPE)
    for rows in (1, 8, 64):
        x, weights = torch.randn(rows, size).to(DTYPE), torch.rand(rows, choices)
        ids = torch.rand(rows, experts).argsort(1)[:, :choices].contiguous()
        used = len(ids.unique())

        def run(op: Operation, inputs=(x, ids, weights)) -> object:
            return op(*inputs, gate_up, down, activation="silu")

        yield Case(f"{rows} rows", "moe", run, used * 6 * size * inner, rows * choices * 6 * size * inner)


def norm_cases() -> Iterator[Case]:
    weight = torch.randn(1024).to(DTYPE)
    for rows in (1, 8, 512):
        x = torch.randn(rows, 1024).to(DTYPE)
        yield Case(f"{rows} rows", "rms_norm", lambda op, x=x: op(x, weight, 1e-6), 2 * x.nbytes, 4 * x.numel())


def index_cases() -> Iterator[Case]:
    """GLM-5.3-Flash: 512 of the pooled keys of 4 tokens each."""
    heads, size, pool, selected = 32, 128, 4, 512
    situations = (("decode 8, 8192 tokens", [1] * 8, 8191), ("prefill 256, no choice", [256], 0))
    for name, rows, context in (*situations, ("prefill 256 after 7936", [256], 7936)):
        batch, _, table = make_batch(rows, context)
        keys = torch.randn(table.block_tables.numel(), BLOCK_SIZE // pool, size).to(DTYPE)
        q, weights = torch.randn(sum(rows), heads, size).to(DTYPE), torch.randn(sum(rows), heads)

        def run(op: Operation, inputs=(q, weights, keys), batch=batch, table=table) -> object:
            return op(*inputs, batch, table, num_selected=selected)

        pairs = 0 if context == 0 else sum(count * (context + count / 2) / pool for count in rows)
        yield Case(name, "index_select", run, keys.nbytes + 4 * sum(rows) * selected, 2 * pairs * heads * size)


def selected_cases() -> Iterator[Case]:
    """2,048 tokens of 8,192: heads of Qwen3.8-Flash-Next, and GLM-5.3-Flash's latents, of which keys and values are one."""
    for model, (heads, key_heads, size) in (("qwen", (24, 2, 256)), ("glm", (64, 1, 512))):
        for name, rows, context in (("decode 8", [1] * 8, 8191), ("prefill 128", [128], 8064)):
            batch, _, table = make_batch(rows, context)
            k = torch.randn(table.block_tables.numel(), BLOCK_SIZE, key_heads, size).to(DTYPE)
            v = k if model == "glm" else torch.randn_like(k)
            q = torch.randn(sum(rows), heads, size).to(DTYPE)
            groups = torch.rand(sum(rows), context // 4).argsort(1)[:, :512].sort(1).values
            selected = (4 * groups[..., None] + torch.arange(4)).flatten(1).int()

            def run(op: Operation, inputs=(q, k, v, selected), batch=batch, table=table, size=size) -> object:
                return op(*inputs, batch, table, scale=size**-0.5)

            read = len(rows) * (2048 if len(rows) > 1 else 8192) * key_heads * size * 2 * (1 if model == "glm" else 2)
            yield Case(f"{model}, {name}", "selected_attention", run, read, 4 * sum(rows) * 2048 * heads * size)


def scan_cases() -> Iterator[Case]:
    channels, size = 8192, 16
    A = -torch.rand(channels, size)
    for name, rows in (("decode 1", [1]), ("decode 8", [1] * 8), ("prefill 512", [512])):
        batch, table, _ = make_batch(rows)
        x, dt = torch.randn(sum(rows), channels).to(DTYPE), torch.rand(sum(rows), channels) * 0.1
        b, c = (torch.randn(sum(rows), size).to(DTYPE) for _ in range(2))
        state = torch.zeros(len(rows), channels, size)

        def run(op: Operation, inputs=(x, dt, A, b, c), state=state, batch=batch, table=table) -> object:
            return op(*inputs, state, batch, table)

        # An exponential of a state element is about eight operations beside the five of its update.
        yield Case(name, "selective_scan", run, 2 * state.nbytes + 10 * x.numel(), 13 * x.numel() * size)


def fading_cases() -> Iterator[Case]:
    """Every recurrence at decays that keep almost all, and that bring states to the denormal numbers: none may cost more."""
    rows = 512
    heads, size = 16, 128
    batch, table, _ = make_batch([rows])
    q, k, v = (torch.randn(rows, heads, size).to(DTYPE) for _ in range(3))
    beta, state = torch.rand(rows, heads), torch.zeros(1, heads, size, size)
    channels, inner = 8192, 16
    x, dt, A = torch.randn(rows, channels).to(DTYPE), torch.ones(rows, channels), torch.ones(channels, inner)
    b, c = (torch.randn(rows, inner).to(DTYPE) for _ in range(2))
    wide = torch.zeros(1, channels, inner)
    for log_decay in (-0.01, -1.0, -10.0, -60.0, -86.0, -90.0, -95.0, -120.0):
        name, decays = f"{rows} rows, decay {log_decay:g}", torch.full((rows, heads), log_decay)

        def delta(op: Operation, decays: torch.Tensor = decays) -> object:
            return op(q, k, v, decays, beta, state, batch, table, scale=size**-0.5, qk_l2norm=True)

        def linear(op: Operation, decays: torch.Tensor = decays) -> object:
            return op(q, k, v, decays, state, batch, table)

        def selective(op: Operation, log_decay: float = log_decay) -> object:
            return op(x, dt, A * log_decay, b, c, wide, batch, table)

        yield Case(name, "delta_rule", delta, 2 * state.nbytes, 7 * rows * heads * size * size)
        yield Case(name, "linear_scan", linear, 2 * state.nbytes, 5 * rows * heads * size * size)
        yield Case(name, "selective_scan", selective, 2 * wide.nbytes + 10 * x.numel(), 13 * x.numel() * inner)


def trailing_cases() -> Iterator[Case]:
    """The raw index keys of an open group of four, as GLM-5.3-Flash keeps them."""
    width, size = 4, 257
    for name, rows in (("decode 8", [1] * 8), ("prefill 1024", [1024])):
        batch, table, _ = make_batch(rows)
        x, window = torch.randn(sum(rows), size).to(DTYPE), torch.zeros(len(rows), width - 1, size, dtype=DTYPE)
        wanted = torch.arange(sum(rows))[:: 1 if len(rows) > 1 else 4]

        def run(op: Operation, inputs=(x, wanted, window), batch=batch, table=table) -> object:
            return op(*inputs, batch, table)

        yield Case(name, "trailing", run, 2 * len(wanted) * width * size * 2, 0)


CASES = (
    *(linear_cases, head_linear_cases, delta_rule_cases, attention_cases, conv_cases, moe_cases, norm_cases),
    *(index_cases, selected_cases, scan_cases, fading_cases, trailing_cases),
)


def measure(case: Case, operations: tuple[Operation, ...], rounds: int) -> list[float]:
    """Median seconds of each implementation; they take turns, so that what else the machine does hits all alike.

    With one thread they are seconds of the processor, not of the clock: what others take of it does not count.
    """
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: list[list[float]] = [[] for _ in operations]
    for _ in range(rounds + 1):
        for seconds, operation in zip(found, operations, strict=True):
            started = now()
            case.run(operation)
            seconds.append(now() - started)
    return [statistics.median(seconds[1:]) for seconds in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Operations of the CPU backends")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", help="some operations")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    native, plain = cpu.offer(device, DTYPE), reference.offer(device, DTYPE)
    if not native.ops:
        raise SystemExit(f"no native kernels here: {native.reason}")
    rates = floors.measure()
    print(f"{rates}\nnative: {native.reason}; reference: {plain.reason}\n")
    print(f"{'operation':<20}{'case':<24}{'native ms':>10}{'reference ms':>14}{'floor ms':>10}")
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for case in itertools.chain.from_iterable(cases() for cases in CASES):
            if options.only is None or case.operation in options.only:
                offered = [ops[case.operation] for ops in (native.ops, plain.ops) if case.operation in ops]
                times = measure(case, tuple(offered), options.rounds)
                rows.append(
                    {
                        "operation": case.operation,
                        "case": case.name,
                        "native_ms": round(times[0] * 1e3, 4) if len(offered) == 2 else None,
                        "reference_ms": round(times[-1] * 1e3, 4),
                        "floor_ms": round(case.floor_s(rates) * 1e3, 4),
                    }
                )
                milliseconds = [f"{seconds * 1e3:.3f}" for seconds in (*times, case.floor_s(rates))]
                if len(offered) == 1:
                    milliseconds.insert(0, "-")
                print(
                    f"{case.operation:<20}{case.name:<24}{milliseconds[0]:>10}{milliseconds[1]:>14}{milliseconds[2]:>10}",
                    flush=True,
                )
    if options.json:
        found = {"threads": options.threads, "rounds": options.rounds, "rates": str(rates), "native": native.reason, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
