"""Text processing of language models in the gateway: chat templates, tokenizers, detokenizing of token streams, stop
strings, and tool calls.

The code is synchronous, for threads outside the event loop.
"""
