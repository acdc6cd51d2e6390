"""Diff: what is not the same in two checkpoints, in numbers; reads nothing where digests agree."""

from __future__ import annotations

from ckptstore.diff.checkpoints import diff
from ckptstore.diff.difference import Difference

__all__ = ["Difference", "diff"]
