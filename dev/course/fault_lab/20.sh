area="context parallelism"
layout="--ranks 4 --cp 2 --batch 8"
title="the mask of a rank's second half stands one half too early"
change='@@ train_llama3.cu attention_shape
- s.q_gap = cp_position(m->cp, s.q_split, m->T) - s.q_split - s.q_offset;
+ s.q_gap = (int)max_i64(0, cp_position(m->cp, s.q_split, m->T) - s.q_split - s.q_offset - m->T / 2);'
check="test mesh-faults"
expected="cp 2 .*worst gradient"
bug="Rank 0 computes parts 0 and 3 of a sequence. The causal mask of part 3 is that of part 2: these queries do not see
their own part, and not even their own token."
unseen="A mask that hides too much leaks nothing, so no loss is suspiciously low. A quarter of the tokens is predicted
from a context that ends at least 16 tokens earlier, and the mean over all tokens is higher, as it is for a smaller
model."
found="The tests compare a layout with cp 2 with one rank on the same samples: losses and gradients differ."
known="huggingface/accelerate pull request 4177 (context parallelism replaced every layer's mask by the causal one;
training runs and the loss looks plausible)"
