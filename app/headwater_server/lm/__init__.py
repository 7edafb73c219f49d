"""Language models in the gateway: channels to their engines, and the text work."""
