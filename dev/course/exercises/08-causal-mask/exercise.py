"""The mask of attention under context parallelism."""
FUNCTIONS = ["query_position", "keys_seen"]
TESTS = ["kernels:attention", "kernels:attention-keys"]
HINT = ("Check: a query sees its own key, so one key more than its position; the gap begins with the query q_split "
        "itself; no query sees more than Tk keys, nor fewer than 0.")
DERIVATION = """
Queries of a rank are two runs of consecutive positions. Query t of the first run is at q_offset + t; from q_split on
there are q_gap positions more, those of the parts in between, which other ranks have. A query at position p sees the
keys 0 to p: p + 1 of them, at most Tk, and none if p is negative (a query of padding in front of the sequence).
"""
