area="pipeline parallelism"
layout="--ranks 2 --pp 2 --batch 4 --accum 4"
model=tied
title="the two gradients of a tied embedding are not summed over the stages"
change='@@ shared_gradients.h sum_tied_weight
- if (count) tree_sum(fsdp->dev, u->grad, other_copy, DTYPE_F32, 1, count, 1);'
check="test mesh-faults"
expected="pp 2 .*tied.*worst gradient"
bug="A tied weight is the embedding on the first stage and the head on the last one. Each stage has one half of its
gradient. Here the stages exchange their halves and do not add them, so the copies become two different weights."
unseen="The curve is lower: the run has silently become one of a model with an untied head, which has more parameters.
The checkpoint holds one of the two weights. eval_llama3 gives the saved model a loss of 4.7, while the
run had logged 2.1."
found="The tests compare the gradient of the tied weight with that of one rank, and the two copies with each other."
known="uw-syfi/piper issue 13 (copies of a tied embedding on two stages were not synchronized); NVIDIA/Megatron-LM has
a process group for this all-reduce alone (issue 299)"
