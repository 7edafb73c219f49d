"""Hugging Face folders served as models: a module for each kind of task, and modules that they share."""
