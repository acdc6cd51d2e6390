"""The experiment from end to end, and its report."""
