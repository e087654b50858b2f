area="initialization"
layout="--ranks 4 --tp 2 --batch 8"
title="tensor-parallel ranks draw the same initial weights"
change='@@ llama3.h tensor_init
- uint64_t bits = mix64(key + (uint64_t)(first + i) * 0x9E3779B97F4A7C15ull);
+ int64_t own = first + i - tensor->first_row * tensor->whole_cols - tensor->first_col;
+ uint64_t bits = mix64(key + (uint64_t)own * 0x9E3779B97F4A7C15ull);'
check="test mesh-faults"
expected="tp 2 .*worst gradient"
bug="Each rank draws its slice of a matrix from the same random numbers, as if all ranks had set one seed. The two
halves of the heads, of the MLP and of the vocabulary start equal, so the model depends on the layout, and half of its
hidden units start as copies of the other half."
unseen="The first loss is that of any random model, 5.54. The two slices have different tokens or inputs somewhere,
which soon makes them different. That it takes longer looks like an unlucky seed or learning rate."
found="In this program an initial weight depends on seed, tensor and element only, so every layout has the first loss
and the first gradients of one rank. A layout with tp 2 has others."
known="InternLM/InternLM pull request 405, modelscope/ms-swift pull request 7944 (the same seed on all tensor-parallel
ranks)"
