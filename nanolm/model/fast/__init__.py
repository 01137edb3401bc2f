"""What computes the plain model of `gpt.py` faster, and is put on and taken off from outside.

`training.py` speeds up training, `decoding.py` writes one token at a time, `int8.py` is for
sampling on a CPU. The plain model is what each of them is tested against.
"""
