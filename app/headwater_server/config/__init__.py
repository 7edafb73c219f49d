"""The configuration: its schema, and the overlays of loads and reloads."""
