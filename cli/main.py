"""The entry point: runs a command, and turns whatever happens into one line and an exit code. Never a traceback."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from .memory import give_back_large_blocks

PROGRAM = "ckpt"
COMPLETION_VARIABLE = "_CKPT_COMPLETE"
"""Set by the shell's completion script when it asks what could follow."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``ckpt`` with ``arguments`` (default: those of the process) and exit."""
    if sys.platform == "win32":
        sys.stderr.write(f"{PROGRAM}: Windows is not supported; use Linux, macOS or WSL\n")
        raise SystemExit(5)
    _open_missing_streams()
    give_back_large_blocks()
    raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run ``ckpt``; returns the exit code after having told the error, if there was one."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        # Also while modules are being loaded, which takes most of the time of a short command.
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending, and a second one has nothing to add
        why = "what was written is whole; run the same command again"
        return _say(arguments, {"error": "interrupted", "what": "interrupted", "why": why, "hint": ""}, 130)
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except OSError as error:
        _discard_stdout()
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        told = {"error": "no-space" if is_full else "backend", "what": "the system failed", "why": str(error)}
        # The store's own calls never end here; what has no name is standard output, or the directory that we are in.
        hint = "look at what is named there, and run it again"
        if error.filename is None:
            is_gone = error.errno == errno.ENOENT
            hint = "go to a directory that is there" if is_gone else "look at where the output goes, and run it again"
        return _say(arguments, {**told, "hint": hint}, 8 if is_full else 7)


def _run(arguments: Sequence[str]) -> int:
    import click

    from ckptstore.errors import CkptStoreError

    from .exits import INTERNAL, USAGE
    from .root import ckpt

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("ckptstore").handlers = [_Warnings(as_json="--json" in arguments)]
    if COMPLETION_VARIABLE in os.environ:
        ckpt.main(list(arguments), prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE)
    try:
        with ckpt.make_context(PROGRAM, list(arguments)) as context:
            code = ckpt.invoke(context)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as done:
        sys.stdout.flush()
        return done.exit_code
    except CkptStoreError as error:
        told = {"error": error.code, "what": error.what, "why": error.why, "hint": error.hint}
        return _say(arguments, told, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        return USAGE
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        hint = f"see {where.command_path if where is not None else PROGRAM} --help"
        return _say(
            arguments, {"error": "usage", "what": error.format_message().rstrip("."), "why": "", "hint": hint}, USAGE
        )
    except (KeyboardInterrupt, OSError):
        raise
    except Exception as error:
        if os.environ.get("CKPT_DEBUG"):
            traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        hint = "please report it; CKPT_DEBUG=1 shows where it happened"
        return _say(arguments, {"error": "internal", "what": "this is a bug", "why": why, "hint": hint}, INTERNAL)


class _Warnings(logging.Handler):
    """What the library warns of, as a line on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(logging.WARNING)
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        from . import output

        if self._as_json:
            output.record({"type": "warning", "what": record.getMessage()}, err=True)
        else:
            output.note(f"{PROGRAM}: warning: {record.getMessage()}")


def _say(arguments: Sequence[str], error: Mapping[str, str], code: int) -> int:
    """The one line about an error. Returns ``code``."""
    from . import output

    return output.error(error, code, as_json="--json" in arguments)


def _open_missing_streams() -> None:
    """Let every standard stream be something. What is opened in place of a closed one would else be a file of a store,
    and take what somebody says on standard error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _discard_stdout() -> None:
    """Let the interpreter flush what is left into nothing at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
