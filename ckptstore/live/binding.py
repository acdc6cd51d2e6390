"""The binding: what of a torch process decides bits, and what of it is not as it was."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint, Deviation


def default_binding() -> dict[str, object]:
    """Versions, thread counts and determinism switches of this process, as plain values; no names of machines."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32,
    }


def drift(parent: Checkpoint, binding: Mapping[str, object]) -> list[Deviation]:
    """What of ``binding`` is not as it was in ``parent``."""
    stored = values.from_json(parent.binding, "binding")
    actual = values.from_json(values.to_json(dict(binding), "binding"))
    assert isinstance(stored, dict)
    assert isinstance(actual, dict)
    return [
        Deviation(f"binding.{key!s}", repr(stored.get(key)), repr(actual.get(key)))
        for key in sorted(stored.keys() | actual.keys(), key=str)
        if values.to_json(stored.get(key)) != values.to_json(actual.get(key))
    ]
