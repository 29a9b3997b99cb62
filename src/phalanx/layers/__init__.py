"""Building blocks of a decoder: linear, norm, rope, embedding."""
