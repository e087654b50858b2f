area="overlap of communication"
layout="--ranks 4 --batch 4"
title="the embedding is used before its all-gather has finished"
change='@@ fsdp.h fsdp_unshard
+ if (u->table_unit->kind != UNIT_EMBED)
  comm_wait(fsdp->comm, &u->all_gather);
@@ fsdp.h fsdp_reshard
+ comm_wait(fsdp->comm, &u->all_gather);
  pool_release(fsdp->dev, &fsdp->pools[POOL_WEIGHTS], u->unsharded_weights);'
check="test faults"
expected="gradients of one rank"
bug="The wait for the all-gather of the embedding comes when its buffer is freed, and not before it is used. The
embedding computes with what the buffer holds at that moment: the weights of the step before, zeros in the first step,
or a mixture of both."
unseen="The buffer serves the embedding alone, so what it holds is old and not wrong: weights of the step before.
Whether the race is lost depends on the machine, so that the curve may differ from run to run. It ends just above those
of five seeds."
found="Before the first step the tests fill all buffers of gathered weights with the value 3. Who reads too early gets
a gradient that is far from that of one rank."
known="a missing synchronization of streams in PyTorch's threaded process group, which FSDP's tests run on
(pytorch/pytorch 195281, as ROCm/pytorch pull request 3612 tells it): it always went well on one vendor's GPUs"
