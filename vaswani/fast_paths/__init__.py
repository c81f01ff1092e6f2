"""Other ways of computing what the model computes; `fast_paths_vaswani.py` decides when they are taken."""
