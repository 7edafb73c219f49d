"""Hugging Face folders as models: one module for each task, in the words of transformers and sentence-transformers."""
