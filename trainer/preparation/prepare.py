"""Freezing a run before it starts: plan, inputs and numerical sources as three folders, the same bytes everywhere.

Nothing in them depends on the folder's name, the working directory, the clock, the locale or the umask, so the digest
of the three trees, the prepared identity, is one for all who prepare the same profile with the same sources.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore import errors
from ckptstore.errors import BackendError, CorruptError, NotFoundError, RefusedError
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from trainer.compute.config import partition
from trainer.compute.numerics import env_for
from trainer.data import cohorts, conversations, tokenizer
from trainer.data.template import TEMPLATE
from trainer.errors import of_system
from trainer.preparation import planning
from trainer.preparation.plan import COMPUTE, KILL, Numerics, Plan
from trainer.preparation.planning import INSTALLED, Profile
from trainer.preparation.staged import INPUTS, PLAN, PLAN_FILE, SOURCES, weights_path
from trainer.starting import smollm2
from trainer.starting.committed import CommittedSource
from trainer.starting.directory import open_directory
from trainer.starting.llama_gguf import open_gguf
from trainer.starting.source import Source, digest_of, write_shard

TRAINER = Path(__file__).parents[1]
ASSETS = TRAINER / "assets"
TEMPLATE_ASSET = ASSETS / "tokenizer" / TEMPLATE

_TORCH_SECONDS = 300  # for importing torch, also from a cold disk

_NOTICE = f"""\
conversations.jsonl and retention.jsonl hold conversations of the package
{conversations.PACKAGE} {conversations.RELEASE} by Gunther Cox and contributors, under the BSD licence.
The tasks in the other files are generated.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The three folders to be stored as trees, and the plan that is in the first."""

    plan_dir: Path
    inputs_dir: Path
    sources_dir: Path
    plan: Plan


def prepare(
    profile: Profile,
    directory: Path,
    *,
    compute: str,
    kernels: str = "native",
    mode: str = KILL,
    start: Path | None = None,
) -> Prepared:
    """Write the folders ``plan``, ``inputs`` and ``sources`` of a profile under ``directory``, which is made if absent.

    Weights are written shard by shard and tensor by tensor: no more than one tensor is in memory.

    Args:
        profile: what is trained, for instance :func:`trainer.preparation.planning.profile` of a name.
        directory: without any of the three folders.
        compute: ``bfloat16`` or ``float32``; :func:`choose_compute` says what this machine's CPU supports.
        kernels: the numerics profile that workers start with, as in :func:`trainer.compute.numerics.env_for`.
        mode: how the drill loses its host, ``kill`` or ``stop``.
        start: a Hugging Face directory or a GGUF file whose model is trained in place of the profile's own.

    Raises:
        RefusedError: one of the folders is there already, or the tokenizer has more tokens than the model.
        NotFoundError: the conversations' package is not installed, or starting weights or a committed file are absent.
        CorruptError: starting weights or conversations are not those that this release was made for.
        MalformedError: ``start`` is no model of this shape.
        BackendError: a file cannot be written.
    """
    for folder in (PLAN, INPUTS, SOURCES):
        if os.path.lexists(directory / folder):
            raise RefusedError(
                f"{directory / folder}", "is there already", "prepare into a new folder, or remove what is there"
            )
    source = open_source(profile, start)
    profile = planning.fitted(profile, source.config)
    files = source.tokenizer()
    rendered = tokenizer.from_files(files)
    if rendered.vocabulary > profile.config.vocab:
        raise RefusedError(
            "tokenizer", f"has {rendered.vocabulary} tokens, and the model's embedding {profile.config.vocab} rows"
        )
    corpus = conversations.load()
    eligible = planning.short_enough(corpus.conversations, rendered, profile.conversation_tokens)
    drawn = cohorts.draw(profile.seed, profile.counts, eligible)

    inputs = {f"data/{name}.jsonl": cohorts.write(documents) for name, documents in drawn.sets().items()}
    inputs |= {"data/NOTICE": _NOTICE.encode(), "weights/NOTICE": source.notice.encode()}
    inputs |= {f"tokenizer/{name}": data for name, data in files.items()}
    _write(directory / INPUTS, inputs)
    digest = _write_weights(source, profile, directory / INPUTS)
    plan = planning.make_plan(profile, drawn, rendered, corpus.digest, digest, Numerics(compute, kernels), mode)
    _write(directory / SOURCES, source_files())
    # Last, because a folder without a plan is refused wherever it is used.
    _write(directory / PLAN, {PLAN_FILE: plan.encode()})
    return Prepared(directory / PLAN, directory / INPUTS, directory / SOURCES, plan)


def open_source(profile: Profile, start: Path | None) -> Source:
    """The starting weights: those of ``start``, a directory or a GGUF file, else the profile's own.

    Raises:
        NotFoundError, MalformedError, CorruptError: they are absent, no model of this shape, or damaged.
    """
    if start is not None and start.suffix == ".gguf" and not start.is_dir():
        return open_gguf(start, "Weights and tokenizer are those of a GGUF file.\n")
    if start is not None:
        return open_directory(start)
    if profile.start == INSTALLED:
        return smollm2.open_installed()
    return CommittedSource(profile.config, start_weights(profile.name), _asset(TEMPLATE_ASSET))


def _write_weights(source: Source, profile: Profile, inputs: Path) -> Digest:
    listed: list[Json] = []
    for owner in partition(profile.config, profile.cuts):
        path = inputs / weights_path(owner.index)
        listed += write_shard(source, owner, path)
        path.chmod(0o644)
    return digest_of(source, listed)


def read_plan(directory: Path) -> Plan:
    """The plan in a folder of :func:`prepare`. RefusedError if there is none, MalformedError if it is not one."""
    try:
        data = (directory / PLAN_FILE).read_bytes()
    except FileNotFoundError:
        raise RefusedError(f"{directory}", f"has no {PLAN_FILE}", "prepare or stage it first") from None
    return Plan.parse(data)


def start_weights(profile: str) -> bytes:
    """The committed file of starting weights. CorruptError if it has not the digest that is recorded beside it."""
    data = _asset(ASSETS / f"{profile}-start.safetensors")
    recorded = json.loads(_asset(ASSETS / f"{profile}-start.json"))["digest"]
    actual = str(Digest.of(data))
    if actual != recorded:
        why = f"expected {recorded}, found {actual}"
        raise CorruptError(f"starting weights of {profile}", why, "restore the file from version control")
    return data


def source_files() -> dict[str, bytes]:
    """Every Python file of the trainer and of the library, and pyproject.toml, by path from the project's root."""
    files: dict[str, bytes] = {}
    for package in (TRAINER, Path(errors.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            files[f"{package.name}/{path.relative_to(package).as_posix()}"] = path.read_bytes()
    project = TRAINER.parent / "pyproject.toml"
    return {**files, project.name: project.read_bytes()}


def choose_compute(kernels: str = "native") -> str:
    """``bfloat16`` if this CPU has kernels for it under the numerics profile ``kernels``, else ``float32``.

    Torch is asked in a process of its own, so that the caller stays without it.

    Raises:
        UsageError: there is no such numerics profile.
        BackendError: torch could not be asked.
    """
    question = "from trainer.compute import numerics; print(numerics.compute_dtype())"
    search = os.pathsep.join(filter(None, (str(TRAINER.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **env_for(kernels), "PYTHONPATH": search}
    command = [sys.executable, "-c", question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=_TORCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BackendError("asking torch for BF16 kernels", f"no answer within {_TORCH_SECONDS} s") from None
    answer = done.stdout.strip()
    if done.returncode or answer not in COMPUTE:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise BackendError("asking torch for BF16 kernels", last, "install the extra: pip install ckptstore[torch]")
    return answer


def _asset(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"asset {path.name}", f"not in {path.parent}", "restore it from version control") from None


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o644)
        except OSError as error:
            raise of_system(error, f"writing {path}") from None
