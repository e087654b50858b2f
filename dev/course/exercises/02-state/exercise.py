"""What a rank keeps between steps: all categories of the dry run, and the bf16 shard from what others gather of it."""
from answers import Mistake, Number, Solved
from program import command_line, plan, traffic

OPTIONS = "--model llama3-8b --world 8"
RANKS = 8
NUMBERS = [Number("bytes of state per rank", "bytes")]


def solve():
    memory = plan(OPTIONS)["rank_classes"][0]["memory"]
    fp32 = memory["params"] + memory["grads"] + memory["optimizer"]
    # With shard_grad_op a rank receives every other rank's bf16 shard once.
    shard = traffic(plan(f"{OPTIONS} --sharding shard_grad_op"), "fsdp", "all_gather") // (RANKS - 1)
    right = fp32 + shard
    shard_elements = shard // 2
    mistakes = [
        Mistake(fp32, "2 bytes per parameter are missing. Matmuls and all-gathers are in bf16, so there is a second "
                "copy of the shard; and gradients are summed and kept in fp32."),
        Mistake(right - memory["grads"], "4 bytes per parameter are missing: is it the sum of gradients, the fp32 "
                "master weight, or one of AdamW's two moments?"),
        Mistake(right * RANKS, "That is the state of the whole model. full_shard gives each of the 8 ranks an eighth."),
        Mistake(8 * shard_elements, "That is a run with everything in bf16, in which small updates would be lost."),
    ]
    derivation = f"""\
Per parameter: master weight 4, gradient 4, exp_avg 4, exp_avg_sq 4, and the bf16 copy of the weight 2: 18 bytes.
A rank's shard has {shard_elements:,} parameters, an eighth of {RANKS * shard_elements:,} (no padding: every tensor is
a multiple of 128 · 8 elements). 18 · {shard_elements:,} = {right:,} bytes.
In the plan: params {memory['params']:,}, grads {memory['grads']:,}, optimizer {memory['optimizer']:,}; the bf16 shards
are in comm, as "weights in the compute dtype"."""
    return Solved([right], [mistakes], derivation, [command_line(OPTIONS)])
