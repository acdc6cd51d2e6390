"""Worker processes and their hosts: orders, events, fences, one launched group."""
