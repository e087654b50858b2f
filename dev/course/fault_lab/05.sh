area="resuming a run"
layout="--ranks 4 --batch 4"
resumes=1
title="after a resume the learning rate is that of the step before"
change='@@ train_llama3.cu update_weights
- s->lr = learning_rate_at(&trainer->job->period->rate, step);
+ s->lr = learning_rate_at(&trainer->job->period->rate, step - (trainer->job->start.step > 0));'
check="resume"
expected="learning rate"
bug="A run that resumes from step 200 trains step 201 with the learning rate of step 200, and stays one step late until
the end. Schedulers that count their own calls often do this: the call at the end of the last step was not saved, or
the call at the start was made twice."
unseen="From one step to the next the rate changes by less than one percent. No curve resolves that."
found="A run that is stopped and resumed must print the same digits as one that was not. The first line after the
resume has another learning rate, and from the next line on the losses differ."
known="THUDM/slime pull request 1547 (the scheduler was advanced twice at each resume)"
