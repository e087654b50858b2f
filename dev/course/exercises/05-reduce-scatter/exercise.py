"""The end of a gradient's reduction over ranks."""
FUNCTIONS = ["reduction_finish"]
TESTS = ["layouts"]
HINT = ("Check in this order: does every path wait for the request before it reads what arrived; is the first "
        "micro-batch written and are later ones added; does each hop sum its own number of elements; is the hop "
        "empty again?")
DERIVATION = """
A reduce-scatter runs as an all-to-all: rank i receives from each of n ranks the piece of the gradient that i owns, and
sums the n pieces in fp32 as a binary tree, which is why bits do not depend on the order of arrival. The first
micro-batch replaces what is in the shard; later ones add. Only now may the full-size gradient go back to the pool.
Replicas then do the same with slices of the shard. The all-gathers need no sum: fp32 arrives where it belongs, and bf16
is converted once, after the last micro-batch, so that the running fp32 sum is not overwritten by its rounded value.
"""
