"""`hybridserve generate MODEL --prompt TEXT`: complete prompts in this process and print the text.

Owns the sampling flags, which `chat` shares. The engine is `hybridserve.llm.LLM`'s matter.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from hybridserve.cli.flags import Sources, add_config, add_settings, at_least, changed
from hybridserve.cli.folder import text_folder
from hybridserve.config import EngineSettings
from hybridserve.errors import UsageError

#: Tokens per answer when neither flag nor model says it.
DEFAULT_MAX_TOKENS = 128

_NUMBERS: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "min_tokens": (int, "tokens to generate at least"),
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "sample from the most likely tokens that sum to this probability"),
    "top_k": (int, "sample from so many most likely tokens; 0 is no limit"),
    "min_p": (float, "leave out tokens less likely than this share of the most likely one"),
    "repetition_penalty": (float, "above 1 makes what was said less likely"),
    "presence_penalty": (float, "above 0 makes what was said less likely, once"),
    "frequency_penalty": (float, "above 0 makes what was said less likely, each time"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine, the prompts and the sampling."""
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable; default: standard input")
    parser.add_argument("--chat", action="store_true", help="render each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object per choice")
    parser.add_argument("--num-choices", type=at_least(1), default=1, metavar="N", help="choices per prompt")
    add_sampling(parser)
    add_settings(parser, EngineSettings, positional="model")
    add_config(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags; those that are not given leave the choice to the model's generation config."""
    group = parser.add_argument_group("sampling", "default: the model's generation_config.json")
    for name, (kind, text) in _NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar="N", help=text)
    group.add_argument("--sampling-seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")


def sampling_of(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, object]:
    """Fields of `SamplingParams` from flags, over the model's own."""
    given = {name: getattr(arguments, name) for name in _NUMBERS if getattr(arguments, name) is not None}
    fields = {"max_tokens": DEFAULT_MAX_TOKENS, **defaults, **given}
    if "min_tokens" in defaults and "min_tokens" not in given:
        fields["min_tokens"] = min(defaults["min_tokens"], fields["max_tokens"])
    return {
        **fields,
        "seed": arguments.sampling_seed,
        "stop": tuple(arguments.stop or defaults.get("stop", ())),
        "ignore_eos": arguments.ignore_eos,
    }


def run(arguments: argparse.Namespace) -> int:
    """Print every choice of every prompt."""
    engine = Sources(arguments).settings(EngineSettings)
    prompts = arguments.prompt or [sys.stdin.read()]
    if not all(prompts):
        raise UsageError("the prompt is empty; give one with --prompt or on standard input")
    from hybridserve.engine.generation_config import read_sampling_defaults
    from hybridserve.llm import LLM
    from hybridserve.request import SamplingParams

    values = sampling_of(arguments, read_sampling_defaults(text_folder(engine.model)).items())
    sampling = SamplingParams(n=arguments.num_choices, **values)  # type: ignore[arg-type]  # it checks every field itself
    settings = changed(engine)
    with LLM(str(settings.pop("model")), **settings) as llm:
        if arguments.chat:
            results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
        else:
            results = llm.generate(prompts, sampling)
        if llm.has_chat_template and not arguments.chat and not all(output.text for one in results for output in one.outputs):
            print("note: the model had nothing to add; it is made for chats: try --chat", file=sys.stderr)
    choices = [(prompt, output) for prompt, result in zip(prompts, results, strict=True) for output in result.outputs]
    for prompt, output in choices:
        if arguments.json:
            fields = {"prompt": prompt, "index": output.index, "text": output.text, "finish_reason": output.finish_reason}
            print(json.dumps(fields, ensure_ascii=False))
        else:
            print(output.text if len(choices) == 1 else f"--- {prompt!r:.60}\n{output.text}")
    return 0
