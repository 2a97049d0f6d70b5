"""A training that is stalled, killed and restarted, held against one that is left alone."""
