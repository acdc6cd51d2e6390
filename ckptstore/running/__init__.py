"""A training run: resumes, saves, and what goes on behind it."""
