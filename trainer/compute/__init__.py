"""The arithmetic of a worker: model, schedule, transport, one update; what decides bits."""
