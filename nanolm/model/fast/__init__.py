"""Makes the plain model of `gpt.py`, which each part is tested against, faster from outside: for
training, for decoding one token at a time, and in int8 for sampling on a CPU."""
