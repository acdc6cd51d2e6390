"""Checkpoint documents; the digest of one is the root (F-80 to F-88)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ckptstore.errors import MalformedError
from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields, as_list, close_document, open_document, parse_digest
from ckptstore.format.page import Role, parse_role, sort_key
from ckptstore.format.progress import Progress
from ckptstore.format.shard import Alias, encode_aliases, parse_aliases


@dataclass(frozen=True, slots=True)
class Replica:
    """An entry that several shards hold with equal values; it counts once."""

    role: Role
    path: str


@dataclass(frozen=True, slots=True)
class Deviation:
    """Why this checkpoint is not an exact continuation of its parent."""

    code: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One training state: everything that a root covers. Nothing in it is a time, host, path, user or attempt."""

    step: int
    parent: Digest | None
    run: Digest | None
    state_root: Digest
    rng_root: Digest
    shards: tuple[Digest, ...]
    ties: tuple[Alias, ...]
    replicas: tuple[Replica, ...]
    progress: Progress
    binding: Json
    files: Digest | None
    deviations: tuple[Deviation, ...]

    def encode(self) -> bytes:
        """Document bytes; their plain BLAKE3 is the root."""
        return close_document(
            "checkpoint",
            {
                "step": self.step,
                "parent": _optional(self.parent),
                "run": _optional(self.run),
                "state_root": str(self.state_root),
                "rng_root": str(self.rng_root),
                "shards": [str(digest) for digest in self.shards],
                "ties": encode_aliases(self.ties),
                "replicas": [{"role": list(r.role), "path": r.path} for r in self.replicas],
                "progress": self.progress.to_json(),
                "binding": self.binding,
                "files": _optional(self.files),
                "deviations": [{"code": d.code, "expected": d.expected, "actual": d.actual} for d in self.deviations],
            },
        )

    @staticmethod
    def parse(data: bytes) -> Checkpoint:
        """The checkpoint of document bytes."""
        fields = open_document(data, "checkpoint")
        checkpoint = Checkpoint(
            step=fields.count("step"),
            parent=fields.optional_digest("parent"),
            run=fields.optional_digest("run"),
            state_root=fields.digest("state_root"),
            rng_root=fields.digest("rng_root"),
            shards=tuple(parse_digest(node, "shards") for node in as_list(fields.take("shards"), "shards")),
            ties=parse_aliases(fields, "ties"),
            replicas=fields.items("replicas", _parse_replica),
            progress=Progress.from_json(fields.take("progress")),
            binding=fields.take("binding"),
            files=fields.optional_digest("files"),
            deviations=fields.items("deviations", _parse_deviation),
        )
        fields.end()
        if not checkpoint.shards:
            raise MalformedError("checkpoint", "it has no shard")
        if type(values.plain_from_json(checkpoint.binding, "binding")) is not dict:
            raise MalformedError("checkpoint", "its binding is not a dict")
        keys = [sort_key(r.role, r.path) for r in checkpoint.replicas]
        if any(left >= right for left, right in pairwise(keys)):
            raise MalformedError("checkpoint", "replicas are not sorted, or one repeats")
        return checkpoint


def _optional(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)


def _parse_replica(node: Json) -> Replica:
    fields = Fields(node, "replica")
    replica = Replica(parse_role(fields.take("role"), "replica"), fields.text("path", empty=True))
    fields.end()
    return replica


def _parse_deviation(node: Json) -> Deviation:
    fields = Fields(node, "deviation")
    deviation = Deviation(fields.text("code"), fields.text("expected", empty=True), fields.text("actual", empty=True))
    fields.end()
    return deviation
