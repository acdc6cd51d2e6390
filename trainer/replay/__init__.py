"""Proof of exact resume: the updates between two checkpoints are made again, by whoever has the store."""
