"""What is frozen before a run: plan, inputs, numerical sources, and what a host gets of them."""
