"""Requests that once took a server from everybody else, and what another client sees while they run."""
