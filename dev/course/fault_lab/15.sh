area="pipeline parallelism"
layout="--ranks 2 --pp 2 --batch 4 --accum 4"
title="a micro-batch's gradient overwrites the sum of those before it"
change='@@ lib/comm/ordered_sum.h sum_target
- *replace = s->as_tree ? m % 2 == 0 : m == 0;
+ *replace = s->as_tree ? m % 2 == 0 : 1;'
check="test mesh-faults"
expected="tp 2 .*worst gradient"
bug="Each of the four micro-batches of a step should add its gradient to the step's sum. Here each replaces the sum,
and AdamW sees the last micro-batch only."
unseen="The loss that is logged is summed separately and has all micro-batches, and it falls. The gradient is that of a
quarter of the batch; AdamW cancels its size and not its noise, which costs as much as a batch of four samples does.
The gradient norm, a third of what it should be, is the better hint."
found="The tests compare the gradient of a step with that of one rank which takes the same samples. Here the one rank
has the same fault! On the pipeline both sum 16 micro-batches and keep the last one, so they agree, and only the layout
in which a rank has 8 of them differs. A reference that shares the code must take another way through it."
known="NVIDIA-NeMo/Automodel pull request 3530 (pipeline stages were initialized again between micro-batches, and only
the last one counted), ServiceNow/Fast-LLM issue 550 (a copy where an addition was meant)"
