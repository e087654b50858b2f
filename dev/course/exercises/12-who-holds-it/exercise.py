"""Batch arithmetic from a plan's tokens per step, and the holders of a tensor from the program's own tensor table."""
from pathlib import Path

from answers import Mistake, Number, Solved
from program import command_line, plan, run_c

TP, PP, SHARD, REPLICAS, T, TOKENS = 8, 4, 8, 2, 8192, 4 * 2**20
WORLD = TP * PP * SHARD * REPLICAS
BLOCK, NAME = 30, "mlp.gate_proj"
OPTIONS = (f"--model llama3-70b --world {WORLD} --tp {TP} --pp {PP} --dp-shard {SHARD} --dp-replicate {REPLICAS} "
           f"--seq {T} --batch 1")
NUMBERS = [Number("micro-batches per step (--accum)", "micro-batches"),
           Number("ranks that hold a part of the tensor", "ranks"),
           Number("ranks that hold its first element", "ranks")]


def facts():
    tensor = f"model.layers.{BLOCK}.{NAME}.weight"
    return {"options": OPTIONS, "world": WORLD, "tensor": tensor, "tokens": f"{TOKENS:,}"}


def solve():
    of_plan = plan(OPTIONS)
    groups = {axis: len(of_plan["groups"][axis][0]) for axis in ("tp", "fsdp", "dp_replicate")}
    accum = TOKENS // of_plan["tokens_per_step"]
    shards, unit, begin, elements = run_c(Path(__file__).parent / "shards.c", "llama3-70b", TP, PP, SHARD, REPLICAS,
                                          BLOCK, NAME)
    some, copies = groups["tp"] * shards * groups["dp_replicate"], groups["dp_replicate"]
    of_accum = [
        Mistake(TOKENS // T // WORLD or 1, "Not every rank has a sequence of its own: ranks that differ only in tp or "
                "pp work on the same one."),
        Mistake(accum * REPLICAS, "Replicas have different samples, too."),
        Mistake(accum * SHARD, "dp_shard ranks share the state, but each trains on its own samples."),
        Mistake(accum * SHARD * REPLICAS, "That is the number of sequences per step. How many of them does one "
                "data-parallel rank take?"),
        Mistake(accum * PP, "Pipeline stages work on the same micro-batches, one after the other."),
    ]
    of_some = [
        Mistake(WORLD, "Pipeline stages have different blocks: only one stage has this one."),
        Mistake(WORLD // PP, "A unit is one flat buffer that is cut into equal shards. This tensor is only a part of "
                "the unit, so not every shard has some of it."),
        Mistake(TP * SHARD, "There are replicas, and not every shard of the unit has a part of this tensor."),
        Mistake(groups["tp"] * shards, "These are the ranks of one replica."),
        Mistake(shards * groups["dp_replicate"], "Tensor parallelism splits gate_proj by its rows: each tp rank has a "
                "part of it."),
        Mistake(shards, "These are the ranks of one fsdp group. How many groups have the block?"),
    ]
    of_copies = [
        Mistake(groups["tp"] * copies, "tp ranks have different rows of the matrix, and within an fsdp group each "
                "element has one owner."),
        Mistake(1, "dp_replicate makes copies of the sharded state."),
        Mistake(some, "That counts ranks with some part of the tensor. One element is in one part only."),
    ]
    size, end = unit // SHARD, begin + elements
    derivation = f"""\
A micro-batch of {SHARD} · {REPLICAS} data-parallel ranks has {of_plan['tokens_per_step']:,} tokens; {TOKENS:,} are \
{accum} of them.
The tp rank's part of the block is a unit of {unit:,} elements: norm 8,192, q 8,388,608, k and v 1,048,576 each,
o 8,388,608, norm 8,192, then gate_proj from {begin:,} to {end:,}, then up and down. A shard has
{unit:,} / {SHARD} = {size:,} elements, so gate_proj lies in shards {begin // size} to {(end - 1) // size}:
{shards} of {SHARD} fsdp ranks. Each of {TP} tp ranks and {REPLICAS} replicas has that:
{shards} · {TP} · {REPLICAS} = {some}.
One element is in one row, so on one tp rank; in one shard; and in each of the {copies} replicas."""
    return Solved([accum, some, copies], [of_accum, of_some, of_copies], derivation,
                  [command_line(f"{OPTIONS} --accum {accum}")])
