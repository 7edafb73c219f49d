"""Metrics: what each process counts, in files that outlive it, and how these become one answer to a scrape."""
