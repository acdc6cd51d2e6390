"""From shards to a checkpoint that a ref names: attempts, joining, proof, verdict."""
