"""The command with its subcommands, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from parcompiler.cli.checkpoint import checkpoint_command
from parcompiler.cli.commands import (
    calibrate_command,
    compile_command,
    diff_command,
    plan_command,
    report_command,
    verify_command,
)
from parcompiler.cli.output import Settings, code_of, show
from parcompiler.cli.train import train_command

EXIT_CODES = """\
\b
Exit codes:
  0    done
  1    a fault in the plan: it breaks rules, nothing fits, the model cannot be
       captured, or the program is not equal to the model
  2    wrong use: an option, a path, a file or a model that does not import
  130  interrupted"""


@click.command("completion", short_help="Complete commands and options in your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
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


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="parcompiler", message="parcompiler %(version)s")
def parcompiler() -> None:
    """Divide the training of a PyTorch model over many devices.

    \b
    Look at a plan of Llama before you rent the cluster (nothing is downloaded):
      parcompiler plan hf:config.json --mesh pipeline=4,tensor=2 --device h100

    \b
    Write the scripts of all ranks, and prove on this machine that they train
    your model exactly:
      parcompiler compile model.py:make --mesh pipeline=2 --export out/
      parcompiler verify  model.py:make --mesh pipeline=2

    \b
    Train on a text, with all ranks on this machine:
      parcompiler train hf:config.json --mesh pipeline=2 --data docs/ --save run/

    Each command explains itself: parcompiler plan --help
    """


for _command in (
    plan_command, compile_command, verify_command, train_command, diff_command, report_command,
    checkpoint_command, calibrate_command, completion_command,
):  # fmt: skip
    parcompiler.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (those of this process) and return its exit code."""
    settings = Settings()
    try:
        outcome = parcompiler.main(
            arguments, prog_name="parcompiler", standalone_mode=False, obj=settings
        )
        sys.stdout.flush()
    except BaseException as error:  # any error of a model becomes one message
        return code_of(error, settings)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """The entry point of the command."""
    sys.exit(run())
