area="context parallelism"
layout="--ranks 4 --cp 2 --batch 8"
title="a rank numbers its tokens as if they followed each other"
change='@@ train_llama3.cu positions_open
- positions[t] = cp_position(m->cp, t, m->T);
+ positions[t] = m->cp->rank * m->T + t;'
check="test mesh-faults"
expected="cp 2 .*worst gradient"
bug="With cp 2, rank 0 computes parts 0 and 3 of the four parts of a sequence, and rank 1 parts 1 and 2. Here RoPE
rotates rank 0's tokens as if they were the first half of the sequence and rank 1's as if they were the second."
unseen="The causal mask is right, so nothing leaks. Within each half of a rank's tokens the distances are right too,
and most of what a small model learns depends on the nearest tokens. The rest costs less than a badly chosen learning
rate."
found="The tests compare a layout with cp 2 with one rank on the same samples: the gradients of the queries and keys
differ by far more than rounding."
known="NVIDIA/Megatron-LM pull request 5243 (packed sequences with context parallelism used positions of the wrong
sequence), ByteDance-Seed/VeOmni pull request 448 (RoPE's table was not split with the sequence)"
