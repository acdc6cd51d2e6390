"""Evidence: archives that a stranger can check without a store, without torch and without us."""

from ckptstore.evidence.archive import ArchiveInfo, faults, pack, unpack, verify
from ckptstore.evidence.examine import Fault
from ckptstore.evidence.manifest import Manifest, Member, Reference

__all__ = ["ArchiveInfo", "Fault", "Manifest", "Member", "Reference", "faults", "pack", "unpack", "verify"]
