"""The control socket between supervisor and gateway workers: routing table, messages and both ends."""
