"""Who may do what: keys, their scopes and limits, and TLS."""
