area="resuming a run"
layout="--ranks 4 --batch 4"
resumes=1
title="the optimizer's moments are not restored"
change='@@ run/checkpoint/checkpoint.h weights_load
- fsdp_set_state(f, STATE_EXP_AVG, fill_from_checkpoint, &r);
- fsdp_set_state(f, STATE_EXP_AVG_SQ, fill_from_checkpoint, &r);'
check="test checkpoints"
expected="are 4 steps"
bug="A resumed run has its weights, its step and its data, but AdamW's two moments are zero. It takes some twenty steps
until they have their values again; until then the updates have the wrong size."
unseen="The moments forget their past within tens of steps anyway. A few steps after the resume are a little worse, and
the noise of the batches is larger than that."
found="The tests compare the files of a run of four steps with those of two steps, a resume and two more steps: weights
and moments must have the same bytes."
known="NVIDIA-NeMo/Automodel issue 763 (after a refactoring, a resume no longer loaded the optimizer's state)"
