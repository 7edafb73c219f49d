"""The OpenAPI description of the models and routes that this server serves now."""
