area="resuming a run"
layout="--ranks 4 --batch 4"
resumes=1
title="a resumed run begins its epoch again"
change='@@ run/setup/job.h job_sampler
- s.start_epoch = j->start.epoch;
- s.start_sample = j->start.samples_in_epoch;'
check="audit"
expected="a second time"
bug="The checkpoint says how many samples of the epoch were consumed. The resumed run ignores that and reads the epoch
from its first sample: what was read before the checkpoint is read again, and the end of the epoch is never reached."
unseen="The order is shuffled with the same seed, but no step is an obvious repetition: the weights have changed. On
data that is seen a second time the loss is slightly lower, which looks like progress."
found="samples.jsonl lists the samples of each step. --audit reads it across resumes and finds each sample that was
consumed twice in an epoch, with both steps."
known="huggingface/accelerate issue 2016 and pull request 4071 (a resume in the second epoch continued in the order of
the first)"
