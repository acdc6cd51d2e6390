"""``ckpt completion``: the script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import output
from .command import Session, command

SHELLS = ("bash", "zsh", "fish")


@command("completion", store=False)
@click.argument("shell", type=click.Choice(SHELLS))
def COMMAND(session: Session, shell: str) -> None:
    """Print the script that lets a shell complete ckpt's commands and options.

    \b
    bash   eval "$(ckpt completion bash)"            in ~/.bashrc
    zsh    eval "$(ckpt completion zsh)"             in ~/.zshrc
    fish   ckpt completion fish | source             in ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    root = click.get_current_context().find_root()
    script = made(root.command, {}, "ckpt", "_CKPT_COMPLETE").source()
    if session.json:
        output.record({"type": "completion", "shell": shell, "script": script})
    else:
        click.echo(script)
