"""Where starting weights come from: the interface, and the way from any source to one file a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ckptstore.errors import MalformedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from trainer.compute import weights
from trainer.compute.config import Config, Ownership
from trainer.compute.weights import StoredTensor


class Source(Protocol):
    """Trained weights with their shape and tokenizer. Tensors are read one at a time and none is kept."""

    @property
    def config(self) -> Config:
        """Shape of the whole model."""

    @property
    def notice(self) -> str:
        """Where the weights come from, and under which licence where that is known."""

    @property
    def known(self) -> Digest | None:
        """The digest under which these weights are known already, if there is one."""

    def tokenizer(self) -> dict[str, bytes]:
        """The files of the tokenizer directory, by name."""

    def dtype(self, name: str) -> str:
        """Dtype in which :meth:`read` gives the tensor, as safetensors names it: ``F32`` or ``BF16``.

        Raises:
            NotFoundError: it is not there.
        """

    def read(self, name: str) -> StoredTensor:
        """A tensor by its name in the public Llama checkpoints. Reads its bytes and no others.

        Raises:
            NotFoundError: it is not there.
            CorruptError: its bytes are not, or are no numbers.
        """


def write_shard(source: Source, owner: Ownership, path: Path) -> list[Json]:
    """Write what a shard owns into one new safetensors file, holding one tensor at a time.

    Returns:
        For each tensor a list of name, dtype, shape, and BLAKE3 of its bytes.

    Raises:
        MalformedError: a tensor of the source has another shape than the shard's.
        BackendError: the file cannot be written.
        NotFoundError, CorruptError: as :meth:`Source.read`.
    """
    listed: list[Json] = []

    def tensors() -> weights.Tensors:
        for name, shape in owner.tensors:
            tensor = source.read(name)
            if tensor.shape != shape:
                raise MalformedError(
                    f"tensor {name}", f"has shape {list(tensor.shape)}, its configuration says {list(shape)}"
                )
            listed.append([name, tensor.dtype, list(shape), str(Digest.of(tensor.data))])
            yield tensor

    weights.write(path, [(name, source.dtype(name), shape) for name, shape in owner.tensors], tensors())
    return listed


def digest_of(source: Source, listed: list[Json]) -> Digest:
    """What a plan calls its starting weights by: the digest they are known by, else that of their tensors.

    Args:
        source: where they are from.
        listed: all tensors of the model, as :func:`write_shard` lists them, in any order; so the digest is the same
            however the model is partitioned.
    """
    if source.known is not None:
        return source.known
    return Digest.of(canonical.encode(sorted(listed, key=lambda entry: entry[0])))  # type: ignore[index, arg-type, return-value]
