"""The benchmark: how fast this model is beside others with the same weights on the same machine."""
