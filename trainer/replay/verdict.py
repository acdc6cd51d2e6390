"""Whether what was made again is what was recorded, bit for bit; if not, the first update and tensor that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore import Digest, Store
from trainer.workers.fingerprints import Fingerprint

_NAMED = 3  # tensors in one line


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay parts from the record: after ``update``, first in ``tensor`` (None: in no tensor), and how."""

    update: int
    tensor: str | None
    text: str

    def __str__(self) -> str:
        where = f"update {self.update}" if self.tensor is None else f"update {self.update}, tensor {self.tensor}"
        return f"{where}: {self.text}"


def compare_update(expected: Fingerprint, made: Fingerprint) -> Difference | None:
    """How an update that was made again differs from its recorded fingerprint, or None if it does not.

    The tensor is the first in the order of the network; a state that was not recorded is not compared.
    """
    wrong = [
        f"{name} is {number}, recorded is {expected.exact[name]}"
        for name, number in made.exact.items()
        if number != expected.exact[name]
    ]
    if expected.update != made.update:
        wrong.insert(0, f"the record has update {expected.update} in its place")
    tensors = _differing(_by_name(expected), _by_name(made)) if expected.state else []
    if tensors:
        wrong.append(f"weights or moments are not as recorded: {_listed(tensors)}")
    return Difference(made.update, tensors[0] if tensors else None, "; ".join(wrong)) if wrong else None


def compare_root(store: Store, expected: Digest, scratch: Store, made: Digest, update: int) -> Difference | None:
    """How a checkpoint that was made again differs from the one in ``store``, or None if the roots are equal.

    It is asked after all recorded fingerprints were found equal: so a state that differs was changed after its last
    update and before it was committed, or its record was.
    """
    if expected == made:
        return None
    found = store.diff(expected, made, scratch)
    text = f"the checkpoint is {expected}, its updates lead to {made}: {found.headline()}"
    if found.tensors:
        text += "; " + "; ".join(map(str, found.tensors[:_NAMED]))
        text += f" and {len(found.tensors) - _NAMED} more" if len(found.tensors) > _NAMED else ""
    return Difference(update, found.tensors[0].path if found.tensors else None, text)


def _by_name(one: Fingerprint) -> Mapping[str, Digest]:
    return {tensor.name: tensor.digest for tensor in one.state}


def _differing(expected: Mapping[str, Digest], made: Mapping[str, Digest]) -> list[str]:
    names = [*made, *(name for name in expected if name not in made)]
    return [name for name in names if expected.get(name) != made.get(name)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
