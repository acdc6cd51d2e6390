"""What the caller of a run decides, and whether it fits a run that was begun already."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore.errors import UsageError
from trainer.lifecycle.access import near
from trainer.preparation.plan import Plan
from trainer.preparation.planning import Profile
from trainer.recovery.entries import Begun


@dataclass(frozen=True, slots=True)
class RunSettings:
    """``spares`` counts the hosts that may be used beside the first ones in the whole run, ``every`` the updates
    between commits (None: the plan says after which); ``operator`` is the URL of a store (None: a folder of the run).
    ``behind``: training goes on while a checkpoint is written and moved. Neither it nor ``spares`` decides a bit.
    ``start`` is a model to train in place of the profile's own; a run that was begun has its starting weights.
    """

    out: Path
    profile: Profile
    spares: int = 0
    every: int | None = None
    operator: str | None = None
    compute: str | None = None
    kernels: str = "native"
    behind: bool = True
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise UsageError("spares", f"{self.spares} is no number of hosts")
        if self.every is not None and self.every < 1:
            raise UsageError("every", f"{self.every} is no number of updates, from 1 on")

    def commits(self, plan: Plan) -> tuple[int, ...]:
        """The updates after which there is a commit; the last one of the plan always is one."""
        return plan.commits if self.every is None else _multiples(self.every, len(plan.updates))

    def command(self, *, spares: int | None = None) -> str:
        """What goes on with this run in a shell."""
        words = [str(near(Path(sys.executable))), "-m", "trainer", "run", "--out", str(near(self.out))]
        words += ["--profile", self.profile.name, "--kernels", self.kernels]
        return shlex.join([*words, "--spares", str(self.spares if spares is None else spares)])


def require_same(settings: RunSettings, begun: Begun | None) -> None:
    """That a run which was begun is the one that is asked for.

    Raises:
        UsageError: it was begun otherwise; a setting that was not given is not compared.
    """
    if begun is None:
        return
    given = {"--profile": (settings.profile.name, begun.profile), "--kernels": (settings.kernels, begun.kernels)}
    if settings.compute is not None:
        given["--compute"] = (settings.compute, begun.compute)
    if settings.every is not None:
        given["--every"] = (_text(_multiples(settings.every, begun.last)), _text(begun.commits))
    if settings.operator is not None:
        given["--operator"] = (ckptstore.open(settings.operator).url, begun.operator)
    for option, (wanted, was) in given.items():
        if wanted != was:
            hint = "leave the option as it was, or name another folder with --out"
            raise UsageError(f"{option} ({wanted})", f"the run in {settings.out} was begun with {was}", hint)


def _multiples(every: int, last: int) -> tuple[int, ...]:
    return (*range(every, last, every), last)


def _text(commits: tuple[int, ...]) -> str:
    return f"commits after {', '.join(map(str, commits))}"
