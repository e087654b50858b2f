"""What a rank receives over fsdp, from the traffic of two dry runs."""
from answers import Mistake, Number, Solved
from program import command_line, plan, traffic

BASE = "--model llama3-8b --world 16 --accum 4"
RANKS, K = 16, 4
NUMBERS = [Number("full_shard", "bytes"), Number("shard_grad_op", "bytes")]


def received(sharding):
    of_plan = plan(f"{BASE} --sharding {sharding}")
    return traffic(of_plan, "fsdp", "all_gather"), traffic(of_plan, "fsdp", "reduce_scatter")


def solve():
    (full_gather, reduce), (once, _) = received("full_shard"), received("shard_grad_op")
    blocks = full_gather // K - once  # bytes received in one all-gather of all blocks
    ends = once - blocks              # … of embedding and head
    full, grad_op = full_gather + reduce, once + reduce
    own_too = RANKS / (RANKS - 1)
    shared = [
        (lambda gather: (gather + reduce) * own_too, "A rank does not receive its own shard: of n pieces it receives "
         "n − 1."),
        (lambda gather: gather + reduce // 2, "Gradients are sent in fp32 here, unless --reduce-dtype says bf16."),
        (lambda gather: gather + reduce // K, "Gradients are reduced after every micro-batch. Only --accumulate local "
         "adds them up first and reduces once."),
        (lambda gather: gather, "That is the all-gathers alone. The gradients have to reach their owners."),
        (lambda gather: reduce, "That is the gradients alone. The weights have to be gathered."),
        (lambda gather: gather + 2 * reduce, "A reduce-scatter is half of an all-reduce: each rank needs the sum of "
         "its own shard only."),
    ]
    of_full = [
        Mistake(K * 2 * once + reduce, "Almost: which units are not resharded between forward and backward, or need no "
                "weights in backward?"),
        Mistake(K * once + reduce, "full_shard frees a block's weights after its forward. What does its backward do?"),
        Mistake(full_gather // K + reduce, "The weights are gathered again for each micro-batch, because they were "
                "freed in between."),
        Mistake(grad_op, "That is shard_grad_op: full_shard frees the weights after each use."),
    ] + [Mistake(wrong(full_gather), hint) for wrong, hint in shared]
    of_grad_op = [
        Mistake(K * once + reduce, "shard_grad_op keeps the weights until the last backward of the step, so later "
                "micro-batches find them there."),
        Mistake(2 * once + reduce, "Backward finds the weights that forward has gathered."),
        Mistake(full, "That is full_shard. How often does shard_grad_op gather?"),
    ] + [Mistake(wrong(once), hint) for wrong, hint in shared]
    derivation = f"""\
Of each unit a rank receives {RANKS - 1}/{RANKS}. All blocks in bf16: {blocks:,} bytes; embedding and head: {ends:,};
all gradients in fp32: {reduce // K:,} bytes per micro-batch, in both strategies.
full_shard: {K} · (2 · {blocks:,} + {ends:,}) + {K} · {reduce // K:,} = {full:,}. Blocks are gathered before forward and
before backward. The head stays unsharded until its backward, which follows at once, and the embedding's backward
reads no weights.
shard_grad_op: {once:,} + {K} · {reduce // K:,} = {grad_op:,}. All weights are gathered once per step."""
    return Solved([full, grad_op], [of_full, of_grad_op], derivation,
                  [command_line(f"{BASE} --sharding {name}") for name in ("full_shard", "shard_grad_op")])
