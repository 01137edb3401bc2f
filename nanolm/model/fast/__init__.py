"""Faster equivalents of the reference model in `gpt.py`, each tested against it: for training, for
decoding one token at a time, and quantized weights for sampling on a CPU."""
