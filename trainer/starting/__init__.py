"""Starting weights and their tokenizers, wherever they were trained: read tensor by tensor, written shard by shard."""
