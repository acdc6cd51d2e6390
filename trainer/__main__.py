"""``python -m trainer``. It imports nothing at first: what Ctrl-C is to say has to be known before all else is."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command of ``sys.argv``; returns the exit code."""
    try:
        from trainer import commands

        return commands.main()
    except KeyboardInterrupt:
        from trainer.interruption import interrupted

        return interrupted()


if __name__ == "__main__":
    sys.exit(main())
