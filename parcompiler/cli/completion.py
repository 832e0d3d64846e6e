"""Completion for shells: the script that a shell evaluates, made by click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from parcompiler.cli.output import show

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Complete commands and options in your shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, schedules, devices and paths.

    \b
    bash:  eval "$(parcompiler completion bash)"      in ~/.bashrc
    zsh:   eval "$(parcompiler completion zsh)"       in ~/.zshrc
    fish:  parcompiler completion fish | source       in config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    root = context.find_root().command
    show(kind(root, {}, "parcompiler", "_PARCOMPILER_COMPLETE").source())
