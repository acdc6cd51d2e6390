"""Retention and collection: which checkpoints a store keeps, which keys go, and how they go without hurting anybody."""
