# Randomized Hadamard rotation: the signs are multiplied in while the transform of fwht.pxi loads a
# row or, for the inverse, over its result while that is in the cache.

def srht(x, signs, out):
    """Write H D x / sqrt(n) to out."""
    transform_rows(x, out, signs, False)


def inverse_srht(y, signs, out):
    """Write D H y / sqrt(n) to out."""
    transform_rows(y, out, signs, True)
