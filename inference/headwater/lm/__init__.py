"""Language models: engines that step all their sequences together, and the host that connects them to gateways."""
