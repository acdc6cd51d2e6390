"""The reference application: a compact trainer of a model that no single worker owns whole (``python -m trainer``)."""
