"""Evaluation results, paired comparisons and the verdict."""
