"""Export: checkpoints as safetensors and JSON, or as the members of an evidence archive; safetensors as checkpoints."""

from __future__ import annotations

from ckptstore.export.directory import extract_checkpoint
from ckptstore.export.evidence import gather_evidence, misnamed_documents
from ckptstore.export.weights import export_weights, import_weights

__all__ = ["export_weights", "extract_checkpoint", "gather_evidence", "import_weights", "misnamed_documents"]
