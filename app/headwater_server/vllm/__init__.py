"""Language models served by vLLM: the gateway checks requests, forwards them to vLLM over HTTP, and relays vLLM's
events to the client."""
