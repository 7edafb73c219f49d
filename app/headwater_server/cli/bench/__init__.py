"""``headwater bench``: puts load on a running server, and reports the results."""
