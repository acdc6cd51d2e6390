"""Hosts behind one interface: what isolates them, the agent on each, and how a worker is started there."""
