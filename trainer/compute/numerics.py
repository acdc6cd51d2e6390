"""What decides the bits of the arithmetic: set it, state it, and measure it.

Names of hardware and libraries do not tell whether two hosts compute alike, so :func:`canary` computes and hashes. A
worker whose canary differs is refused before its first update. Importing this module does not import torch: a launcher
has to set :func:`env_for` before anything does.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckptstore.errors import MalformedError, UsageError
from ckptstore.format import values
from ckptstore.format.canonical import Json
from trainer.errors import NumericsError

if TYPE_CHECKING:
    from torch import Tensor

Plain = str | int | bool | None

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

PROFILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # The fastest kernels of this CPU, each with one fixed code path.
        "native": MappingProxyType({**_ONE_THREAD, "MKL_CBWR": "AUTO,STRICT"}),
        # Kernels that CPUs of several generations have in common; slower, and without BF16.
        "portable": MappingProxyType(
            {**_ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        ),
    }
)

# Fields that may differ where the canary agrees: versions and switches that had no influence on what was computed.
_DESCRIPTIVE = ("python", "torch", "torch_git", "cpu_capability", "bf16_kernels", "blas", "onednn", "env.", "device")


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two bindings differ. ``refuse`` is false where it describes rather than decides."""

    field: str
    expected: Plain
    actual: Plain
    refuse: bool

    def __str__(self) -> str:
        return f"{self.field} is {self.actual}, expected {self.expected}"


def env_for(profile: str) -> dict[str, str]:
    """Environment variables of ``profile`` (``native`` or ``portable``), to be set before torch is imported.

    Raises:
        UsageError: there is no such profile.
    """
    if profile not in PROFILES:
        raise UsageError(f"numerics profile {profile!r}", f"there are {', '.join(PROFILES)}")
    return dict(PROFILES[profile])


def apply(*, threads: int = 1, profile: str | None = None) -> None:
    """Fix what can be fixed in this process: threads, deterministic kernels, no TF32, no reduced BF16 sums.

    Args:
        threads: of one worker; other counts give other bits.
        profile: if given, check that the process was started with its variables.

    Raises:
        NumericsError: the process was started with other variables, and it is too late to change them.
    """
    import torch

    for name, value in (env_for(profile) if profile else {}).items():
        if os.environ.get(name) != value:
            raise NumericsError(
                f"numerics profile {profile}",
                f"{name} is {os.environ.get(name)!r} instead of {value!r}, and torch reads it only when it starts",
                "start the worker with the variables of trainer.compute.numerics.env_for",
            )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling new memory costs time and changes no bit of what is computed from what was written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def bf16_supported() -> bool:
    """Whether oneDNN has BF16 kernels for this CPU; without them BF16 products are slow or refused."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype() -> str:
    """``"bfloat16"`` where the CPU has kernels for it, else ``"float32"``."""
    return "bfloat16" if bf16_supported() else "float32"


def binding(compute: str, *, recompute: bool = True, device: str = "cpu") -> dict[str, Plain]:
    """Everything that decides bits, as flat plain values without names of machines; runs the canary."""
    import torch

    build = torch.__config__.show()
    bound: dict[str, Plain] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "device": _device(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_kernels": bf16_supported(),
        "blas": _version(build, r"Math Kernel Library Version ([\d.]+)", "mkl")
        or _version(build, r"BLAS_INFO=(\w+)", ""),
        "onednn": _version(build, r"MKL-DNN v([\d.]+)", ""),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32,
        "bf16_reduced": bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "compute": compute,
        "boundary": compute,
        "params": "float32",
        "attention": "math",
        "optimizer": "adamw-loop",
        "recompute": recompute,
    }
    bound |= {f"env.{name}": os.environ.get(name) for name in _VARIABLES}
    bound |= {f"canary.{name}": digest for name, digest in canary(device).items()}
    return bound


def compare(expected: Mapping[str, Plain], actual: Mapping[str, Plain]) -> list[Difference]:
    """Every field in which two bindings differ, sorted by name; a field that one of them lacks counts as None.

    Kernel versions and switches are told apart from what decides bits: they only lead to refusal by way of the canary.
    """
    return [
        Difference(name, expected.get(name), actual.get(name), not name.startswith(_DESCRIPTIVE))
        for name in sorted({*expected, *actual})
        if _differ(expected.get(name), actual.get(name))
    ]


def stored_binding(value: Json) -> dict[str, Plain]:
    """The binding in a checkpoint's document as flat plain values. MalformedError if it is another thing."""
    stored = values.from_json(value, "binding")
    found: dict[str, Plain] = {}
    for name, one in stored.items() if isinstance(stored, dict) else [(None, None)]:
        if not isinstance(name, str) or not (one is None or isinstance(one, str | int)):
            raise MalformedError("numerical binding", "it is no dict of texts, integers and booleans by name")
        found[name] = one
    return found


def canary(device: str = "cpu") -> dict[str, str]:
    """SHA-256 digests of small fixed computations, by name; equal digests mean equal arithmetic in what training uses.

    Two updates of a small tied decoder and one long matrix product in each compute dtype (``"unsupported"`` for BF16
    where the CPU has no kernels), and a draw of random numbers. Draws from no global generator.
    """
    digests: dict[str, str] = {}
    for compute in ("bfloat16", "float32"):
        usable = compute == "float32" or device != "cpu" or bf16_supported()
        digests[compute] = _two_updates(compute, device) if usable else "unsupported"
        digests[f"matmul.{compute}"] = _product(compute, device) if usable else "unsupported"
    digests["rng"] = _draw(device)
    return digests


def _two_updates(compute: str, device: str) -> str:
    from trainer.compute.batch import Batch, Microbatch
    from trainer.compute.config import Config, Recipe, partition
    from trainer.compute.model import Shard, initialise
    from trainer.compute.step import Step, build_optimizer
    from trainer.compute.transport import local_groups

    cfg = Config(vocab=96, hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2)
    shard = Shard(cfg, 0, cfg.layers, True, compute)
    initialise(shard, seed=0, std=0.1)
    shard.to(device)
    recipe = Recipe(max_norm=0.1)
    optimizer = build_optimizer(shard, recipe)
    step = Step(shard, optimizer, local_groups(1, device=device)[0], partition(cfg, ()), recipe, recompute=False)
    micros = tuple(
        Microbatch(
            tuple(tuple((7 * r + 11 * t + t * t * m) % cfg.vocab for t in range(length)) for r in range(2)),
            tuple(tuple(0.25 * ((r + t + m) % 5) if t else 0.0 for t in range(length)) for r in range(2)),
        )
        for m, length in enumerate((24, 17))
    )
    results = [step.run(update, Batch(micros)) for update in (1, 2)]
    tensors = [t for p in shard.parameters() for t in (p, *optimizer.state[p].values())]
    return _digest(*tensors, *(value for result in results for value in result.exact.values()))


def _product(compute: str, device: str) -> str:
    import torch

    def factor(rows: int, columns: int, salt: int) -> Tensor:
        cells = torch.arange(rows * columns, dtype=torch.int64).mul_(salt).remainder_(8191).double()
        return (cells / 8191 - 0.5).reshape(rows, columns).to(device, getattr(torch, compute))

    wide = factor(64, 2048, 2_654_435_761) @ factor(2048, 64, 40_503)
    return _digest(wide, wide.float().logsumexp(-1))


def _draw(device: str) -> str:
    import torch

    generator = torch.Generator(device).manual_seed(20)
    draws = [torch.rand(64, generator=generator, device=device), torch.randn(64, generator=generator, device=device)]
    return _digest(*draws, torch.randperm(64, generator=generator, device=device))


def _digest(*items: Tensor | str) -> str:
    from trainer.compute.transport import raw_bytes

    whole = hashlib.sha256()
    for value in items:
        whole.update(value.encode() if isinstance(value, str) else raw_bytes(value.detach().cpu().contiguous()))
    return whole.hexdigest()


def _device(device: str) -> str:
    import torch

    if not device.startswith("cuda"):
        return device
    kind = torch.cuda.get_device_properties(device)
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return (
        f"{kind.name}, sm_{kind.major}{kind.minor}, {kind.multi_processor_count} multiprocessors, "
        f"CUDA {torch.version.cuda}, cuDNN {cudnn}"
    )


def _version(build: str, pattern: str, prefix: str) -> str | None:
    found = re.search(pattern, build)
    return f"{prefix} {found[1]}".strip() if found else None


def _differ(a: Plain, b: Plain) -> bool:
    return type(a) is not type(b) or a != b
