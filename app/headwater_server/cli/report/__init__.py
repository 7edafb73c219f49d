"""Reports as self-contained HTML files: text, tables and plots."""
