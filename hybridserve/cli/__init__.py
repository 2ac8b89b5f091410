"""The `hybridserve` command: picks the subcommand and turns errors into one line and an exit code.

Owns the list of subcommands. A subcommand's module is imported only when it is asked for, so that `--help` is quick.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Protocol

from hybridserve import __version__
from hybridserve.config import let_idle_threads_sleep
from hybridserve.errors import HybridServeError

#: Subcommand -> (help, module). A module has `add_arguments(parser)` and `run(arguments) -> exit code`.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serve a model over HTTP, as OpenAI's API", "hybridserve.cli.serve"),
    "generate": ("complete prompts in this process", "hybridserve.cli.generate"),
    "chat": ("talk to a model in the terminal", "hybridserve.cli.chat"),
    "check-model": ("tell whether a model will run, for how many users, and why not", "hybridserve.cli.check_model"),
    "check-layer": ("prove a layer right: chunks, batches, slots, rollback, and an oracle", "hybridserve.cli.check_layer"),
    "replay": ("replay a trace through the real scheduler and cache", "hybridserve.cli.replay"),
    "bench": ("measure throughput, latency or a running server", "hybridserve.cli.bench"),
}
_INTERRUPTED = 130
_USAGE = 2


class Command(Protocol):
    """A subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0, or that of the error (see `hybridserve.errors`)."""
    let_idle_threads_sleep()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _without_command(arguments)
    name = arguments[0]
    text, module = COMMANDS[name]
    command: Command = importlib.import_module(module)
    parser = argparse.ArgumentParser(f"hybridserve {name}", description=text, allow_abbrev=False)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(_join_negative_values(arguments[1:])))
    except HybridServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _join_negative_values(arguments: Sequence[str]) -> list[str]:
    """`--memory -5GiB` as `--memory=-5GiB`: so that a number below zero is told from a flag, and refused for what it is."""
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"-\.?\d", argument) and joined and re.fullmatch(r"--[\w-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _without_command(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "hybridserve",
        usage="hybridserve COMMAND [options]",
        description="A serving engine for hybrid-architecture language models.",
        epilog=f"commands:\n{listing}\n\nhybridserve COMMAND --help tells its options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybridserve {__version__}")
    if arguments and not arguments[0].startswith("-"):
        print(f"error: unknown command {arguments[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return _USAGE
    parser.parse_args(arguments)
    parser.print_help()
    return _USAGE
