"""One file per op, tensors in and tensors out; references in reference.py."""
