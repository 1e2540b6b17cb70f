"""Job files for clusters: what a config, a number of nodes and a scheduler make. No torch."""
