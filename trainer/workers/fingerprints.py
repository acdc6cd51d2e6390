"""Fingerprints of updates as a document: exact numbers and a digest of each tensor, one line an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from trainer.compute.result import EXACT, UpdateResult
from trainer.preparation import records
from trainer.workers.events import Event

LINE_LIMIT = 4 * 2**20  # bytes; room for some 30,000 tensors


@dataclass(frozen=True, slots=True)
class TensorFingerprint:
    """Digest of a tensor's weight and moments, as in :func:`trainer.compute.fingerprint.combined`."""

    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """An update's numbers as in :class:`trainer.compute.result.UpdateResult`, and the state that it left.

    ``state`` has every tensor of the model, by the order of shards and in each by that of the network; or it is empty,
    where the plan does not ask for the state after this update.
    """

    update: int
    loss: float
    norm: float
    coef: float
    denominator: float
    rate: float
    state: tuple[TensorFingerprint, ...]

    @property
    def exact(self) -> dict[str, str]:
        """The numbers as hexadecimal floats."""
        return {name: float(getattr(self, name)).hex() for name in EXACT}


def make(result: UpdateResult, states: Sequence[Mapping[str, Digest]]) -> Fingerprint:
    """The fingerprint of an update from what all workers have in common and what each shard's tensors are.

    Raises:
        MalformedError: a tensor is on two shards.
    """
    state = tuple(TensorFingerprint(name, digest) for one in states for name, digest in one.items())
    names = [one.name for one in state]
    if len(set(names)) != len(names):
        raise MalformedError(f"fingerprint of update {result.update}", "a tensor is on two shards")
    return Fingerprint(update=result.update, **{name: getattr(result, name) for name in EXACT}, state=state)


def state_of(event: Event) -> dict[str, Digest]:
    """Fingerprints by tensor in a worker's ``update`` event. MalformedError if they are none."""
    return {str(name): Digest.parse(text) for name, text in event["state"].items()}


def encode(fingerprints: Sequence[Fingerprint]) -> bytes:
    """One line of canonical JSON an update; the same updates have the same bytes everywhere."""
    return b"".join(records.encode(one) + b"\n" for one in fingerprints)


def parse(data: bytes) -> tuple[Fingerprint, ...]:
    """The fingerprints in bytes of :func:`encode`. MalformedError if they are none, or updates do not rise by one."""
    *lines, rest = data.split(b"\n")
    if rest:
        raise MalformedError("fingerprints", "the last line has no end")
    found = tuple(records.parse(Fingerprint, line, LINE_LIMIT, "fingerprint") for line in lines)
    numbers = [one.update for one in found]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
        raise MalformedError("fingerprints", "their updates do not rise by one")
    return found
