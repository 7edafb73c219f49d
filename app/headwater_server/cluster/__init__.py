"""Replicas on other machines: agents and their ports, the cluster's supervisor, and gateways."""
