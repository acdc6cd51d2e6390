"""The durability ledger: who read which keys of which store back, and when."""
