"""Tables of the docs that are made from the code, so that they say what it does.

    python -m docs.tables        rewrite the tables in place

A page marks where one belongs with `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced.
`tests/test_docs.py` fails when a page is older than the code. Layers and caches of an architecture are read from a model laid out
for the tiny configs of `tests/checkpoints.py`; what its config may hold, from what its builder expects while it reads them.
"""

import functools
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import msgspec
import torch

from hybridserve import errors
from hybridserve.backends.select import select
from hybridserve.config import EngineSettings, ServerSettings
from hybridserve.conformance.checks import ALL_CHECKS, name_of
from hybridserve.conformance.conduct import check_oracle
from hybridserve.kv.spec import PagedSpec, Spec
from hybridserve.mixers import mixers
from hybridserve.models import CausalLM, architectures, build_model, resolve
from hybridserve.models.reader import ConfigReader
from hybridserve.request import LIMITS
from hybridserve.server import metrics
from hybridserve.server.openapi import openapi
from hybridserve.server.unsupported import UNSUPPORTED

DOCS = Path(__file__).parent

#: Releases that name the class. All from their published config.json; none of their weights are part of the tests.
CHECKPOINTS: Mapping[str, str] = {
    "BailingHybridForCausalLM": "Ling-3.0-Flash",
    "BailingMoeV3ForCausalLM": "Ling-3.0-Flash",
    "BambaForCausalLM": "Bamba-9B",
    "DeepseekV3ForCausalLM": "DeepSeek-V3 and R1",
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2",
    "FalconH1ForCausalLM": "Falcon-H1 0.5B to 34B, Falcon-H1-Tiny-90M",
    "FalconMambaForCausalLM": "falcon-mamba-7b",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B (text part)",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "Glm5NextForConditionalGeneration": "GLM-5.3-Flash",
    "GlmMoeDsaForCausalLM": "GLM-5.2",
    "GptOssForCausalLM": "gpt-oss-20b and 120b",
    "GraniteMoeHybridForCausalLM": "Granite 4.0: h-350m, h-1b, h-micro, h-tiny, h-small; 350m, 1b, micro",
    "JambaForCausalLM": "Jamba v0.1 and 1.5",
    "KimiLinearForCausalLM": "Kimi-Linear-48B-A3B",
    "LaraMiniForCausalLM": "Lara-4-Mini-Base",
    "Lfm2ForCausalLM": "LFM2 350M, 700M, 1.2B, 2.6B; LFM2.5",
    "Lfm2MoeForCausalLM": "LFM2-8B-A1B",
    "Lfm3ForCausalLM": "LFM3-1.7B",
    "LlamaForCausalLM": "Llama 2 and 3, SmolLM2",
    "MambaForCausalLM": "mamba-130m-hf to mamba-2.8b-hf",
    "Mamba2ForCausalLM": "mamba2-2.8b, Mamba-Codestral-7B",
    "MiniMaxForCausalLM": "MiniMax-Text-01, MiniMax-M1",
    "NemotronHForCausalLM": "Nemotron-3 Nano, Super, Ultra",
    "Olmo3ForCausalLM": "Olmo 3 7B, 32B",
    "OlmoHybridForCausalLM": "Olmo-Hybrid-7B",
    "Qwen3ForCausalLM": "Qwen3 0.6B to 32B",
    "Qwen3MoeForCausalLM": "Qwen3 30B-A3B and 235B-A22B",
    "Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5 0.8B to 27B, Qwen3.6-27B, Qwen3.8-27B (text part)",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 35B-A3B to 397B-A17B, Qwen3.6-35B-A3B (text part)",
    "Qwen4ExpForConditionalGeneration": "Qwen3.8-Flash-Next (text part)",
    "Zamba2ForCausalLM": "Zamba2 1.2B, 2.7B, 7B",
}
#: Keys whose only allowed value follows from another key of the same config, which is named.
_RELATIVE = {
    "num_key_value_heads": "num_attention_heads", "experts_per_token": "num_experts_per_tok",
    "layers_block_type": "attn_layer_period", "layers_num_experts": "expert_layer_period",
    "hybrid_layer_ids": "layers_block_type", "attn_rotary_emb": "partial_rotary_factor",
    "attention_hidden_size": "hidden_size", "attention_head_dim": "hidden_size", "head_dim": "hidden_size",
    "kv_channels": "hidden_size", "num_query_groups": "num_attention_heads", "mamba_headdim": "n_mamba_heads",
    "intermediate_size": "expand", "mlp_layer_types": "first_k_dense_replace",
}  # fmt: skip
#: Parts of releases that a text decoder leaves alone: a tensor of it, and what is said.
_PARTS = (
    ("model.visual.blocks.0.x", "images: the vision tower is left alone"),
    ("vision_tower.x", "images: the vision tower is left alone"),
    ("mtp.layers.0.x", "drafts: the extra layers are left alone"),
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


# --- models ---


class Sample:
    """What a tiny config shows of its architecture."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.expected: dict[str, tuple[object, ...]] = {}
        expect = ConfigReader.expect

        def note(reader: ConfigReader, key: str, *allowed: object, given: str = "") -> None:
            self.expected[key] = allowed
            expect(reader, key, *allowed, given=given)

        ops = select(torch.device("cpu"), torch.float32, ["reference"]).ops
        with mock.patch.object(ConfigReader, "expect", note):
            self.model: CausalLM = build_model(config, ops, torch.float32)


@functools.cache
def samples() -> dict[str, list[Sample]]:
    """The samples of each class that the tests have a tiny config of."""
    from tests.checkpoints import TINY  # needs transformers

    found: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for make in TINY.values():
            with torch.device("meta"):
                model = make()
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            config = resolve(f"{folder}/config.json", load_format="dummy").config
            if type(model).__name__ in architectures:
                found.setdefault(type(model).__name__, []).append(Sample(config))
    return found


def model_rows() -> Iterator[tuple[str, ...]]:
    """A row for each builder of the package's own: its classes, what it is, layers, releases and what its config may hold."""
    by_builder: dict[Callable[..., CausalLM], list[str]] = {}
    for name in architectures.names():
        if architectures[name].__module__.startswith("hybridserve.models"):
            by_builder.setdefault(architectures[name], []).append(name)
    seen = samples()
    for builder, names in sorted(by_builder.items(), key=lambda item: (item[0].__module__, item[1])):
        mine = [sample for name in names for sample in seen.get(name, [])]
        kinds = sorted({kind for sample in mine for kind in sample.model.layer_kinds()})
        releases = sorted({CHECKPOINTS[name] for name in names if name in CHECKPOINTS})
        specs = [named for sample in mine for layer in sample.model.cache_specs() for named in layer.items()]
        expected = {key: allowed for sample in mine for key, allowed in sample.expected.items()}
        refused = [_refused(key, allowed) for key, allowed in sorted(expected.items())]
        yield (
            "<br>".join(map(code, names)),
            code("hybridserve/models/" + builder.__module__.rpartition(".")[2] + ".py"),
            ", ".join(map(code, kinds)) or "-",
            "<br>".join(sorted({f"{code(name.partition('.')[2])}: {_kept(spec)}" for name, spec in specs})) or "-",
            "; ".join(releases) or "-",
            "<br>".join([*_parts_left(mine), *refused]) or "-",
        )


def _parts_left(mine: Iterable[Sample]) -> list[str]:
    """Parts of a release that are not used, as far as the names that are left alone tell."""
    found = set()
    for model in (sample.model for sample in mine):
        after_last = f"model.layers.{len(model.layer_kinds())}.x"
        for tensor, text in (*_PARTS, (after_last, _PARTS[-1][1])):
            if model.weight_map.is_ignored(tensor):
                found.add(text)
    return sorted(found, reverse=True)


def _refused(key: str, allowed: tuple[object, ...]) -> str:
    if key in _RELATIVE:
        return f"{code(key)} unlike what {code(_RELATIVE[key])} gives"
    if len(allowed) == 1 and isinstance(allowed[0], bool):
        return f"{code(key)}: {json.dumps(not allowed[0])}"
    return f"{code(key)} other than {' or '.join(json.dumps(value) for value in allowed) or 'null'}"


def cache_rows() -> Iterator[tuple[str, ...]]:
    """A row for each kind of mixer of the package's own and what it keeps."""
    caches: dict[str, set[str]] = {}
    for sample in (sample for group in samples().values() for sample in group):
        for specs in sample.model.cache_specs():
            for name, spec in specs.items():
                kind, _, inner = name.partition(".")
                caches.setdefault(kind, set()).add(f"{code(inner)}: {_kept(spec)}")
    for kind in mixers.names():
        owner = mixers[kind]
        if owner.__module__.startswith("hybridserve.mixers"):
            text = (inspect.getdoc(owner) or "").splitlines()[0]
            yield code(kind), code(owner.__name__), "<br>".join(sorted(caches.get(kind, {"-"}))), text


def _kept(spec: Spec) -> str:
    names = ", ".join(code(tensor.name) for tensor in spec.tensors)
    if not isinstance(spec, PagedSpec):
        return f"state of {names}"
    each = "token" if spec.tokens_per_entry == 1 else f"{spec.tokens_per_entry} tokens"
    return f"paged, {names} per {each}{', within a window' if spec.window else ''}"


# --- settings, routes, errors ---


def setting_rows(kind: type[msgspec.Struct]) -> Iterator[tuple[str, ...]]:
    """A row for each setting: flag, default, help."""
    properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else _default(field.default)
        about = properties[field.name].get("description") or _described(properties[field.name])
        flag = field.name if field.required else "--" + field.name.replace("_", "-")
        yield code(flag), default, about


def _described(schema: Mapping[str, object]) -> str:
    found = re.search(r"'description': '((?:[^'\\]|\\.)*)'|'description': \"([^\"]*)\"", repr(schema))
    return (found[1] or found[2]) if found else ""


def _default(value: object) -> str:
    if value is None or value == ():
        return "-"
    return code(str(value).lower() if isinstance(value, bool) else value)


def limit_rows() -> Iterator[tuple[str, ...]]:
    """A row for each bounded number of a request."""
    powers = {-(2**63): "-2^63", 2**63 - 1: "2^63 - 1", 2**31 - 1: "2^31 - 1"}
    for name, bounds in LIMITS.items():
        yield code(name), *(powers.get(int(bound)) or f"{bound:g}" for bound in bounds)


def check_rows() -> Iterator[tuple[str, ...]]:
    """A row for each check of the conformance kit."""
    for check in (*ALL_CHECKS, check_oracle):
        name = "against oracle" if check is check_oracle else name_of(check)
        yield name, (inspect.getdoc(check) or "").splitlines()[0]


def route_rows() -> Iterator[tuple[str, ...]]:
    """A row for each documented route."""
    for path, methods in openapi("")["paths"].items():
        for method, described in methods.items():
            yield code(f"{method.upper()} {path}"), described["summary"]


def error_rows() -> Iterator[tuple[str, ...]]:
    """A row for each exception that a client can meet."""
    told = (errors.RequestError, errors.OverloadedError, errors.EngineDeadError, errors.EngineError, errors.DeadlineError)
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, told):
            yield str(kind.status), code(kind.kind), code(name), (inspect.getdoc(kind) or "").splitlines()[0]


def exit_rows() -> Iterator[tuple[str, ...]]:
    """A row for each exit code of a command."""
    by_code: dict[int, list[str]] = {}
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.HybridServeError):
            by_code.setdefault(kind.exit_code, []).append(name)
    for exit_code, names in sorted(by_code.items()):
        yield str(exit_code), ", ".join(map(code, names))


def refused_rows() -> Iterator[tuple[str, ...]]:
    """A row for each request field that is refused by name."""
    for name, refusal in UNSUPPORTED.items():
        yield code(name), refusal.remedy


def metric_rows() -> Iterator[tuple[str, ...]]:
    """A row for each metric."""
    from tests.fake_engine import make_info

    for family in metrics.Metrics("m", make_info(vocab_size=1)).collect():
        yield code(family.name + ("_total" if family.type == "counter" else "")), family.type, family.documentation


#: Columns of a replay, by the key of its row, with their digits.
_REPLAY_COLUMNS = {
    "hit_ratio": ("hits", 3),
    "bound_ratio": ("bound", 3),
    "excess_prefill": ("excess prefill", 2),
    "first_token_mean_s": ("first token, mean s", 3),
    "first_token_p50_s": ("p50", 3),
    "first_token_p99_s": ("p99", 3),
    "end_to_end_mean_s": ("to the end, mean s", 2),
    "output_tokens_per_s": ("output tokens/s", 0),
}
_REPLAY_HEAD = ("trace", "memory", "way", *(name for name, _ in _REPLAY_COLUMNS.values()))


def replay_rows() -> Iterator[list[str]]:
    """What `python -m benchmarks.prefix_cache` measured; bold where the default is worse than plain LRU in order of arrival."""
    rows = json.loads((DOCS.parent / "benchmarks" / "results" / "prefix_cache.json").read_text(encoding="utf-8"))
    plain = {(row["trace"], row["memory"]): row for row in rows if row["way"] == "lru, in order"}
    for row in rows:
        other = plain.get((row["trace"], row["memory"])) if row["way"] == "default" else None
        memory = row["memory"] if row["memory"] == "ample" else f"{row['memory']}, {row['nbytes'] / 1e9:.1f} GB"
        cells = [f"{row['trace'].split('.')[0]}, {row['num_requests']}", memory, row["way"]]
        for key, (_, digits) in _REPLAY_COLUMNS.items():
            text = f"{row[key]:,.{digits}f}"
            sign = -1 if key in ("hit_ratio", "output_tokens_per_s") else 0 if key == "bound_ratio" else 1
            is_worse = other is not None and sign * (round(row[key], digits) - round(other[key], digits)) > 0
            cells.append(f"**{text}**" if is_worse else text)
        yield cells


TABLES: Mapping[str, Callable[[], str]] = {
    "replays": lambda: table(_REPLAY_HEAD, replay_rows()),
    "models": lambda: table(("class", "file", "layers", "caches", "releases", "not supported"), model_rows()),
    "mixers": lambda: table(("kind", "class", "caches", "what it computes"), cache_rows()),
    "engine settings": lambda: table(("flag", "default", "meaning"), setting_rows(EngineSettings)),
    "server settings": lambda: table(("flag", "default", "meaning"), setting_rows(ServerSettings)),
    "limits": lambda: table(("field", "from", "to"), limit_rows()),
    "checks": lambda: table(("check", "what it holds the layer to"), check_rows()),
    "routes": lambda: table(("route", "what it does"), route_rows()),
    "errors": lambda: table(("status", "`error.type`", "class", "when"), error_rows()),
    "exit codes": lambda: table(("code", "errors"), exit_rows()),
    "refused fields": lambda: table(("field", "instead"), refused_rows()),
    "metrics": lambda: table(("metric", "kind", "meaning"), metric_rows()),
}
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def main() -> int:
    """Rewrite the tables of all pages; say which have changed."""
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.name} is new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
