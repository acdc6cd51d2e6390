"""The group ``ckpt``: its commands are loaded when they are used, so that none pays for another's imports."""

from __future__ import annotations

from importlib import import_module

import click

import ckptstore

from .command import Settings, json_option, store_option
from .exits import epilog

COMMANDS = {
    "init": ("init", "Make a store."),
    "log": ("log", "List checkpoints and their ancestors."),
    "show": ("show", "Show what a checkpoint says."),
    "ls": ("ls", "List the tensors of a checkpoint."),
    "verify": ("verify", "Read everything again and list all that is wrong."),
    "doctor": ("doctor", "Say what a resumed run would not get back."),
    "scrub": ("scrub", "Read a whole store again, bit by bit."),
    "latest": ("latest", "Show the newest checkpoint of a ref that is whole."),
    "repair": ("repair", "Put back what is damaged, from another copy."),
    "diff": ("diff", "Compare two checkpoints, in numbers."),
    "push": ("push", "Copy a checkpoint to another store."),
    "pull": ("pull", "Fetch a checkpoint from another store."),
    "plan": ("plan", "Say what a push or pull would do and cost."),
    "remote": ("remote", "Let the store know others by name."),
    "durability": ("durability", "Show where copies are, and when each was last read back."),
    "pin": ("pin", "Keep checkpoints whatever refs and policies say."),
    "gc": ("gc", "Delete what nothing leads to, and what a policy lets go."),
    "restore": ("restore", "Write a checkpoint as an ordinary directory."),
    "export": ("export", "Write weights as one safetensors file."),
    "import": ("import_", "Make a checkpoint of a safetensors file."),
    "ref": ("ref", "List, show and move refs."),
    "evidence": ("evidence", "Pack evidence, and verify it without a store."),
    "catalogue": ("catalogue", "Rebuild the index for queries."),
    "endpoint": ("endpoint", "Show what a bucket's endpoint honours."),
    "completion": ("completion", "Print the completion script for a shell."),
}
"""Module and short description by command, in the order of the help page."""


class Commands(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command, or None."""
        if name not in COMMANDS:
            return None
        module, short = COMMANDS[name]
        made = import_module(f".{module}", __package__).COMMAND
        assert isinstance(made, click.Command)
        made.short_help = short
        return made


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=epilog((1, 3, 4, 5, 6, 8, 9)),
    params=[store_option(variable=True), json_option()],
)
@click.version_option(ckptstore.__version__, prog_name="ckpt")
@click.pass_context
def ckpt(context: click.Context, store: str | None, json: bool) -> None:
    """A content-addressed checkpoint and evidence store.

    Wherever a ROOT is asked for, a ref, a full digest or a unique prefix of one (4 hex digits or more) will do. Data
    goes to stdout, progress and errors to stderr.
    """
    context.obj = Settings(store, json)
