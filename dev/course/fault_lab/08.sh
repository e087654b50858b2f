area="precision of gradients"
layout="--ranks 2 --batch 1 --accum 8 --sharding no_shard --reduce-dtype bf16"
one_rank="--batch 1 --accum 16 --reduce-dtype bf16"
title="the running sum over micro-batches is rounded to bf16"
change='@@ fsdp.h reduction_finish
- if (r->rounded && last)
+ if (r->rounded)'
check="test reduce-dtype"
expected="summed in fp32 without sharding"
bug="Gradients may travel in bf16, but their sum over the micro-batches of a step must stay in fp32. Here each rank
replaces its running sum by what came back from the all-gather, in bf16. From some number of micro-batches on, a
summand is smaller than the last digit of the sum, and is lost."
unseen="With eight micro-batches the rounding error is a fraction of a percent of the gradient, below the noise of the
batch. The error grows with the number of micro-batches, so a small test of a large run looks clean."
found="A test sums 1,024 micro-batches with and without sharding and compares the gradient norms. Tests with few
micro-batches cannot see it, so this one takes many."
known="deepspeedai/DeepSpeed issues 2768 and 2352 (bf16 runs that diverged because they accumulated in bf16),
pytorch/pytorch issue 106395 (a run that was stable on 96 GPUs and unstable on 384)"
