# Randomized Hadamard rotation: the signs are applied to the row where it lies, before or after the
# transform of fwht.pxi, in the same pass.

def srht(x, signs, out):
    """Write H D x / sqrt(n) to out."""
    transform_rows(x, out, signs, False)


def inverse_srht(y, signs, out):
    """Write D H y / sqrt(n) to out."""
    transform_rows(y, out, signs, True)
