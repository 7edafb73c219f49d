"""Which replica computes which rows when: queue, admission, calls, losses, graphs."""
