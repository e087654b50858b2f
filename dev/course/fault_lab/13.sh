area="the optimizer"
layout="--ranks 4 --batch 4"
title="norm weights have weight decay"
change='@@ optimizer.h update_unit
- float weight_decay = p.tensor->row->weight_decay ? a->weight_decay : 0.0f;
+ float weight_decay = a->weight_decay;'
check="test pytorch"
expected="weights after ten steps equal"
bug="Weight decay pulls weights towards zero. By convention it applies to matrices only; here it applies to the weights
of the norms, which start at 1, too."
unseen="A decay of 0.1 at this learning rate shrinks a weight by four percent in the whole run, and the next matrix
makes up for most of a norm's scale. The curve ends just above those of five seeds."
found="All layouts do the same, so comparing layouts finds nothing. Ten steps of AdamW with PyTorch's parameter groups
end with other norm weights; gradients and the loss of the first step are equal."
known="ServiceNow/Fast-LLM pull request 545 (a refactoring had lost the exception for norms), huggingface/transformers
pull request 35927 (RMSNorm was not recognized as a norm)"
