"""Format 1: bytes to frozen values and back. Pure: no clock, no files, no torch (docs/format.md is normative)."""
