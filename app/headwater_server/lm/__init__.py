"""Language models in the gateway: channels to the engines, requests and answers of the text APIs, and text
processing."""
