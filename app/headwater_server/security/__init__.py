"""Access control: API keys with scopes and limits, the operator's guard, and TLS."""
