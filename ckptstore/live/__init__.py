"""Live tensors and torch's own state: the only room that imports torch."""
