"""RoPE and its backward on the CPU."""
FUNCTIONS = ["cpu_rope"]
TESTS = ["kernels:rope"]
HINT = ("Check: both outputs need both inputs, so read both before you write; backward changes the sign of the sine in "
        "both lines; the pair of element i is i + HD/2; elements beyond the heads of a row stay as they are.")
DERIVATION = """
A pair is multiplied by the matrix [c -s; s c]. The gradient of its input is the transposed matrix times the gradient of
its output, [c s; -s c]: the rotation by the opposite angle. So backward needs no saved activation, and works in place.
The program's loop reads a token's angles once for all heads, two vectors at a time; a plain loop gives the same numbers
up to rounding.
"""
