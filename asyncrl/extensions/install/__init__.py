"""`asyncrl-install`: the pinned packages, from an index or from a bundle for machines without a network."""
