"""The text work of language models in the gateway: chat template, tokens, text out of a token stream, stop strings.

Plain synchronous code that knows nothing of HTTP: it can be called off the event loop.
"""
