area="data loading"
layout="--ranks 4 --batch 4"
title="ranks 0 and 1 train on the same samples, and so do ranks 2 and 3"
change='@@ dataloader.h sampler_sample
- int64_t j = ((int64_t)s->replica * s->micro_batches + micro_batch) * s->shards + s->shard;
+ int64_t j = ((int64_t)s->replica * s->micro_batches + micro_batch) * s->shards + s->shard / 2 * 2;'
unchecked='@@ run/checks/step_report.h check_reports
- check_samples(r, sampler, step, first_sample);'
check="run"
expected="train on the same samples"
bug="The sampler deals out samples by a wrong rank number: two ranks get the same ones, and half of the samples of each
step are never read. A launcher that gives each process the rank 0 has the same effect."
unseen="Half of the batch is a batch: the form of the curve is that of any run. It ends higher because half of the
samples are lost to each step, as it would with a smaller --batch."
found="At the end of each step every rank sends the others a hash of the samples that it has trained on. Equal hashes
on two data-parallel ranks end the run in step 1. For the curve this check was removed from the copy."
known="pytorch/pytorch issue 40043 (users who misunderstood what each process draws from DistributedSampler)"
