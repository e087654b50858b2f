area="tensor parallelism"
layout="--ranks 4 --tp 2 --batch 8"
title="the loss adds sums of exponentials without a common maximum"
change='@@ lib/ops/logits.h join_parts
- all.sum = fmaf(part[1], expf(part[0] - all.max), all.sum);
+ all.sum = all.sum + part[1];'
check="test kernels:cross-entropy-slices"
expected="cross_entropy in slices"
bug="Each rank has half of the vocabulary and sums exp(logit - its own largest logit). Before the ranks' sums are
added, each must be multiplied by exp(own maximum - common maximum). Without that the softmax gives the half without
the largest logit far too much weight."
unseen="It shows that something is wrong: the loss stays above 4. It does not show what. Everybody's first remedies, a
lower learning rate or a longer warm-up, would be tried first, because the loss that is logged is computed from the
same wrong sum as the gradient."
found="A test cuts rows of logits into slices, joins the results, and compares loss and gradient with the definition
over the whole row, in double precision and with logits up to 10,000 in size."
known="apple/ml-cross-entropy pull request 42 (the gradient of a vocabulary-parallel loss), NVIDIA/Megatron-LM issue
737 (a mean over the rank's part of the vocabulary, taken for the mean over all)"
