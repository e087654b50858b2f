"""The order of a pipeline rank's steps."""
FUNCTIONS = ["warm_up_forwards", "order_steps"]
TESTS = ["pipeline"]
HINT = ("Check with pp 4 and 6 micro-batches on paper: the last rank does forward 0, backward 0, forward 1, …; rank 0 "
        "does four forwards before its first backward. No rank may have more forwards than there are.")
DERIVATION = """
Backward of micro-batch 0 reaches rank r after it has passed all pp - r - 1 later ranks twice. So that they are busy
meanwhile, the rank does that many forwards ahead, then one forward and one backward in turn; the last rank has no
warm-up. More forwards would not make the step shorter, but keep more activations alive: with 1F1B at most pp - r sets.
With V virtual stages the first micro-batches pass all V stages of each rank before the first backward, hence
(V - 1) pp more, and two per later rank, because a gradient travels while the next one is computed.
"""
