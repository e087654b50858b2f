/* forward.h: the forward pass of train_llama3.cu, for what computes without gradients: evaluation, scores and
 * generation. */
#ifndef FORWARD_H
#define FORWARD_H
#include "../pipeline_parallel.h" // defines: Pipeline
#include "model.h"                // defines: Model, HeadWeights
#include "weights.h"              // defines: HeadWeights

/* Each is described where it is defined, in train_llama3.cu. */
void model_forward(Model *m, Pipeline *pipeline, const StepBatch *batch);
const floatX *final_norm_forward(Model *m, const HeadWeights *w);
void head_loss(Model *m, int micro_batch);

#endif
