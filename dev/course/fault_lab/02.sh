area="the model"
layout="--ranks 4 --batch 4"
model=scaled
title="the scaling of RoPE's frequencies is ignored"
change='@@ llama3.h rope_frequency
- if (c->rope_factor == 1 || wavelength < longest_kept) return frequency;
+ return frequency;'
check="test pytorch"
expected="llama3"
bug="config.json asks for Llama 3.1's rope_scaling, which divides the low frequencies of RoPE by a factor. The program
reads the option and then rotates by the unscaled frequencies."
unseen="The faulty run is even lower: undivided frequencies suit 64 tokens better than divided ones, and a model that
trains from scratch learns with either. Nobody looks for an error in a loss that is good. The damage shows when the
weights meet a program that does scale, or with long texts."
found="All layouts make the same mistake, so comparing layouts finds nothing. Only a second implementation knows what
rope_scaling means: the losses, logits and gradients that PyTorch computed for a model with this config.json differ."
known="unslothai/unsloth pull request 6197 (the scaling was dropped on one path; gibberish beyond 29,000 tokens),
Blaizzy/mlx-vlm pull request 1710 (ten models that declared it and ignored it)"
