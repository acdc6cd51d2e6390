"""Training that goes on by itself when workers, hosts or the controller are lost."""
