"""``headwater plan``: measures a deployment at several sizes, fits models of its memory and speed, and recommends
configurations."""
