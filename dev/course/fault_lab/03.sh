area="sharded data parallelism"
layout="--ranks 4 --batch 4"
title="the reduce-scatter leaves out the last rank's contribution"
change='@@ fsdp.h reduction_finish
- sum_add(fsdp->dev, &u->sum, r->micro_batch, r->receive, dtype, pieces);
+ sum_add(fsdp->dev, &u->sum, r->micro_batch, r->receive, dtype, pieces - 1);'
check="test faults"
expected="gradients of one rank"
bug="All four ranks send their gradients, but each rank adds up only the first three pieces that it has received. A
quarter of the batch is computed, sent, and thrown away."
unseen="A smaller batch is a batch: the factor 3/4 cancels in AdamW, the curve has its usual form, and it is no higher
than with half the learning rate. In a run with more ranks or a larger batch the loss of one rank's samples costs less
still. And the bytes are right: everything was sent, so the ledger is balanced."
found="The tests compare the summed gradient, tensor by tensor and before the optimizer, with that of one rank which
takes the same samples one at a time. A missing piece changes every tensor."
known="alpa-projects/alpa issue 273 (an all-reduce was skipped because it had been merged with another one)"
