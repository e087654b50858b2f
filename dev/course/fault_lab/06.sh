area="tensor parallelism"
layout="--ranks 4 --tp 2 --batch 8"
title="the gradients of the norms are not summed over tp"
change='@@ shared_gradients.h sum_tp_replicated
- tree_sum(fsdp->dev, mine, all, DTYPE_F32, tp, n, 0);'
check="test mesh-faults"
expected="tp 2 .*worst gradient"
bug="With sequence parallelism each tensor-parallel rank normalizes half of the tokens, so each has half of the
gradient of the norm weights. Here the halves are exchanged and not added: each rank keeps its own."
unseen="Norm weights are less than one percent of the parameters, and half of the tokens gives nearly the same
direction. The copies of a norm on the two ranks drift apart slowly, and both remain usable. The curve ends above those
of five seeds, and nobody trains these."
found="The tests compare every tensor's gradient with that of one rank, and the copies of a shared weight with each
other, so that a tensor this small counts as much as a matrix."
known="EleutherAI/gpt-neox pull request 1257 (poor convergence until these gradients were all-reduced),
NVIDIA/Megatron-LM issue 1446 (the gradient of the final norm differs between tp ranks)"
