"""What a replay says: ratios against the oracles, latencies, and a picture of the memory over time.

Owns the arithmetic of the report and its two forms, a table and JSON. Called by `cli/replay.py`.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import msgspec

from hybridserve.errors import MissingDependencyError, UsageError
from hybridserve.kv.arena import CachePlan
from hybridserve.replay.oracle import bound_hits, visits_of
from hybridserve.replay.simulate import Outcome
from hybridserve.replay.trace import TraceRequest


class Report(msgspec.Struct, kw_only=True):
    """Figures of one replay; ratios are of the prompt tokens of the requests that ran."""

    policy: str
    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_output_tokens: int
    hit_ratio: float
    oracle_ratio: float  # unlimited memory
    bound_ratio: float  # what no policy can beat with these bytes
    share_of_bound: float
    excess_prefill: float  # tokens computed, again after preemptions too, over those that the unlimited oracle computes
    full_nbytes: int  # memory for all hits of the unlimited oracle and for what runs, on average
    checkpoints_per_request: float
    num_preemptions: int
    num_steps: int
    virtual_s: float
    wall_s: float
    first_token_s: dict[str, float]
    end_to_end_s: dict[str, float]
    output_tokens_per_s: float
    tokens_per_s: float  # prompt and output
    tokens_by_reason: dict[str, int]
    occupancy: list[dict[str, float]]


def make_report(
    trace: Sequence[TraceRequest], plan: CachePlan, outcome: Outcome, *, policy: str, nbytes: int, wall_s: float
) -> Report:
    """Compare an outcome with the oracles. Requests that were refused (too long for the model) count nowhere.

    Raises UsageError when none ran.
    """
    order = [number for number in outcome.order if number in outcome.spans]
    if not order:
        raise UsageError(f"none of the {len(trace)} requests fits into the longest context; raise --memory or --max-model-len")
    ran = [trace[number] for number in order]
    visits = visits_of(ran)
    bound = bound_hits(
        visits,
        [outcome.spans[number] for number in order],
        nbytes=nbytes,
        kv_nbytes_per_token=plan.kv_nbytes_per_token,
        state_nbytes=plan.state_nbytes_per_sequence,
    )
    total, num_output = sum(request.num_prompt for request in ran), sum(request.answer.length for request in ran)
    hits, oracle = sum(outcome.hits[number] for number in order), sum(visit.hit for visit in visits)
    # Every token of an answer but its last is computed once; whatever else is computed is prefill.
    prefill = outcome.num_computed - (num_output - len(ran))
    timings = [timing for timing in outcome.timings if timing is not None]
    return Report(
        policy=policy,
        num_requests=len(ran),
        num_refused=len(trace) - len(ran),
        num_prompt_tokens=total,
        num_output_tokens=num_output,
        hit_ratio=hits / total,
        oracle_ratio=oracle / total,
        bound_ratio=bound.num_hit / total,
        share_of_bound=hits / bound.num_hit if bound.num_hit else 1.0,
        excess_prefill=prefill / (total - oracle),
        full_nbytes=round(bound.full_nbytes),
        checkpoints_per_request=outcome.num_checkpoints / len(ran),
        num_preemptions=outcome.num_preemptions,
        num_steps=outcome.num_steps,
        virtual_s=outcome.clock_s,
        wall_s=wall_s,
        first_token_s=_summary([timing.first_token_s for timing in timings]),
        end_to_end_s=_summary([timing.end_s for timing in timings]),
        output_tokens_per_s=num_output / outcome.clock_s,
        tokens_per_s=(total + num_output) / outcome.clock_s,
        tokens_by_reason=outcome.prompt_tokens_by_reason,
        occupancy=[
            {"clock_s": clock, **{name: float(value) for name, value in usage.items()}} for clock, usage in outcome.occupancy
        ],
    )


def as_table(report: Report) -> str:
    """The report for people."""
    speed = report.virtual_s / report.wall_s if report.wall_s else float("inf")
    rows: list[tuple[str, str]] = [
        ("requests", f"{report.num_requests:,} ({report.num_refused} refused)"),
        ("prompt tokens", f"{report.num_prompt_tokens:,}"),
        ("hit ratio", f"{report.hit_ratio:.4f}"),
        ("oracle, unlimited memory", f"{report.oracle_ratio:.4f}"),
        ("bound, same memory", f"{report.bound_ratio:.4f} (of it: {report.share_of_bound:.3f})"),
        ("memory for all hits", f"{report.full_nbytes / 1e9:,.1f} GB on average"),
        ("excess prefill", f"{report.excess_prefill:.3f}"),
        ("checkpoints per request", f"{report.checkpoints_per_request:.2f}"),
        ("preemptions", f"{report.num_preemptions:,}"),
        ("first token s", _line(report.first_token_s)),
        ("end to end s", _line(report.end_to_end_s)),
        ("tokens/s", f"{report.output_tokens_per_s:,.1f} of output, {report.tokens_per_s:,.1f} with prompts"),
        ("virtual time", f"{report.virtual_s:,.0f} s in {report.wall_s:.1f} s, {speed:.0f} times real time"),
    ]
    rows += [
        (f"  {reason}", f"{count:,}") for reason, count in sorted(report.tokens_by_reason.items(), key=lambda item: -item[1])
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def check_drawing() -> None:
    """Raise MissingDependencyError where `draw` would: before a long replay, not after it."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("--picture needs matplotlib; pip install 'hybridserve[plot]', or use --json")


def draw(report: Report, path: Path) -> None:
    """A picture of superpages in use and pages by kind over virtual time. Raises MissingDependencyError without matplotlib."""
    check_drawing()
    from matplotlib.figure import Figure  # seconds to import, and only a picture needs it

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    clock = [sample["clock_s"] for sample in report.occupancy]
    for name in ("blocks_used", "blocks_cached", "slots_used", "slots_cached"):
        total = name.split("_")[0] + "_total"
        axes.plot(
            clock, [100 * s.get(name, 0.0) / max(1.0, s.get(total, 1.0)) for s in report.occupancy], label=name.replace("_", " ")
        )
    axes.set_xlabel("virtual time, s")
    axes.set_ylabel("% of the arena")
    axes.set_title(f"{report.policy}: hit ratio {report.hit_ratio:.3f}, oracle {report.oracle_ratio:.3f}")
    axes.legend(frameon=False)
    figure.savefig(path)


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    percentiles = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return {"mean": fmean(ordered), **percentiles}


def _line(summary: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in summary.items())
