"""Text processing of language models in the gateway: chat templates, tokenizers, detokenizing of token streams, stop
strings, and tool calls.

The code is synchronous and independent of HTTP, so it can be called in threads outside the event loop.
"""
