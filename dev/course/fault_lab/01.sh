area="sharded data parallelism"
layout="--ranks 4 --batch 4"
one_rank="--batch 4 --accum 4"
title="each rank clips by the norm of its own shard"
change='@@ run/checks/step_report.h sum_reports
+ if (i == r->comm->rank)
  exact_merge(&squared_norm, &report->squared_norm);'
check="one-rank"
expected="gradient norm"
bug="Under FSDP a rank holds a quarter of the gradient. The norm that clipping compares with --clip must be summed over
all ranks; here each rank uses the norm of its own shard, which is about half as large. Shards are clipped less, and
each by its own factor, so that the clipped gradient also has another direction."
unseen="AdamW divides each gradient element by the root of its own running mean square. A factor that hardly changes
from step to step cancels, so clipping by the wrong norm only matters where the norm jumps."
found="One rank has the whole gradient, so its norm is right. With --deterministic, one rank and four must print the
same digits, and the gradient norm already differs in step 1, before any update."
known="pytorch/torchtitan issue 766 (the logged norm differs from rank to rank), pytorch/pytorch issue 72548 (why FSDP
needs a clip_grad_norm_ of its own)"
