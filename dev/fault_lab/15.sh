area="pipeline parallelism"
layout="--ranks 2 --pp 2 --batch 4 --accum 4"
title="a micro-batch's gradient overwrites the sum of those before it"
file=fsdp.h
edit='s|^    \*replace = tree ? micro_batch % 2 == 0 : micro_batch == 0;|'
edit+='    *replace = tree ? micro_batch % 2 == 0 : 1;|'
check="test mesh-faults"
expected="pp 2 .*worst gradient"
bug="Each of the four micro-batches of a step should add its gradient to the step's sum. Here each replaces the sum,
and AdamW sees the last micro-batch only."
unseen="The loss that is logged is summed separately and has all micro-batches. The gradient is a quarter as large,
which AdamW cancels, and has twice the noise, which hundreds of steps average out. Only the gradient norm is far off."
found="The tests compare the gradient of a step with that of one rank which takes the same samples, one micro-batch at
a time."
known="NVIDIA-NeMo/Automodel pull request 3530 (pipeline stages were initialized again between micro-batches, and only
the last one counted), ServiceNow/Fast-LLM issue 550 (a copy where an addition was meant)"
