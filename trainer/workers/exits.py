"""Exit codes of workers, beside those of the error tree: why a process ended that had nothing left to say."""

from __future__ import annotations

PEER_LOST = 17  # another worker is gone; the group is of no use any more
HOLD_EXPIRED = 18  # a drill's fault point was reached and nothing happened
ORPHANED = 19  # nobody reads this worker's events any more
