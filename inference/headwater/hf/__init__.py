"""Hugging Face folders served as models: a module for each kind of task, with options and outputs named as in
transformers and sentence-transformers."""
