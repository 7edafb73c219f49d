"""Language models that vLLM computes: requests are checked and relayed to its HTTP, and its events to the client."""
