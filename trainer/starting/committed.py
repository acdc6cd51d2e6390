"""The starting weights that come with the trainer: one safetensors file, and the byte tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.errors import NotFoundError
from ckptstore.format.digest import Digest
from trainer.compute import weights
from trainer.compute.config import Config
from trainer.compute.weights import StoredTensor
from trainer.data import bytetokenizer


@dataclass(frozen=True, slots=True)
class CommittedSource:
    """A :class:`~trainer.starting.source.Source` of the bytes of a small file, rendered by ``template``."""

    config: Config
    data: bytes
    template: bytes

    @property
    def notice(self) -> str:
        """Where the weights come from."""
        return "The weights were made by python -m trainer.pretrain.\n"

    @property
    def known(self) -> Digest | None:
        """BLAKE3 of the file."""
        return Digest.of(self.data)

    def tokenizer(self) -> dict[str, bytes]:
        """The files of the byte tokenizer."""
        return bytetokenizer.files(self.template)

    def dtype(self, name: str) -> str:
        """As stored. NotFoundError if it is not there."""
        return self.read(name).dtype

    def read(self, name: str) -> StoredTensor:
        """The tensor as stored.

        Raises:
            NotFoundError: it is not there.
            MalformedError, CorruptError: the bytes are no safetensors file.
        """
        tensors = weights.decode(self.data, "starting weights")
        if name not in tensors:
            raise NotFoundError(f"tensor {name}", "not in the starting weights", "restore them from version control")
        return tensors[name]
