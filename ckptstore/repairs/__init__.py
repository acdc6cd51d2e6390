"""Repair: what is damaged or missing comes back from another copy, proven by its digest."""
