"""The default binding: what of a torch process decides bits."""

from __future__ import annotations

import torch


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
