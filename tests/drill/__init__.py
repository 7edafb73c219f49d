"""Three whole Headwaters behind HAProxy, as pods behind a Service: what is lost when they are replaced or fail."""
