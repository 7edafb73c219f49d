"""Model repositories of Triton in a gateway worker: relays requests to a replica's Triton as clients sent them."""
