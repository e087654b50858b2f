area="loss and padding"
layout="--ranks 4 --batch 4"
tokens=masked.tok
title="padding is counted among the targets, and the mean is too small"
change='@@ lib/io/token_files.h dataset_sample
  inputs[t] = (int32_t)token;
+ num_targets += t > 0 && masked && !token_is_target(&f->header, bytes[t]);'
check="test data"
expected="all counted once"
bug="The loss is a sum over targets, divided by their number. Padding is not a target and adds nothing to the sum, but
here it is counted: loss and gradient are too small by the share of padding, which differs from batch to batch."
unseen="The curve is lower, from the first step on, as if the task were easier, and nobody looks for an error in a loss
that is too good. A look at the first value helps: a model that knows nothing has the loss log(256) = 5.55, and this
one begins at 3.2. AdamW cancels the factor, so the weights are trained almost as they should be."
found="A test reads windows with a loss mask and compares the number of targets that the loader reports with the number
of targets that are not ignored."
known="huggingface/transformers issue 24725 and pull request 34191, meta-pytorch/torchtune pull request 1875 (the mean
over the wrong number of tokens, with padding and gradient accumulation)"
