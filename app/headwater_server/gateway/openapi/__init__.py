"""The OpenAPI description of what this server serves now."""
