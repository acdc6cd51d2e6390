"""The same state under other shards: who would own what, and the checkpoint that says so."""
