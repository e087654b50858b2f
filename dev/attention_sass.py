#!/usr/bin/env python3
"""attention_sass.py PROGRAM: counts the instructions of a tile in attention's Hopper kernels and estimates their speed.

PROGRAM is a CUDA build for sm_90a, for example build/cuda-bf16/test_llama3_cuda. Needs cuobjdump and nvdisasm in the
PATH (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). For each kernel the script finds the loop over tiles, follows
its shortest path, which masks and rescales nothing, and counts instructions by the unit that executes them. From these
counts and the documented throughput of an H100 SXM it computes a bound and an estimate of the kernel's speed. Nothing
is measured.
"""
import re
import subprocess
import sys

# H100 SXM: multiprocessors, clock under load in Hz, dense bf16 FLOPs per cycle and multiprocessor (NVIDIA H100 white
# paper: 989.4 TFLOP/s at 132 multiprocessors and 1,830 MHz)
MULTIPROCESSORS, CLOCK, TENSOR_FLOPS = 132, 1.755e9, 4096
# Cycles that a warp's instruction occupies its unit in one of the four parts of a multiprocessor (CUDA C++ Programming
# Guide, "Arithmetic Instructions", compute capability 9.0: results per cycle and multiprocessor of 128, 64, 32 or 16)
UNITS = [
    ("exp2", r"MUFU", 8),
    ("fp32", r"FFMA|FADD|FMUL|MOV", 1),
    ("min, compare, integer", r"IMAD|FMNMX|FSETP|FSEL|ISETP|LOP3|IADD|SHF|SEL|PLOP3|LEA|PRMT|VOTE|R2P|P2R|CS2R|S2R", 2),
    ("conversion", r"F2F|I2F|F2I", 2),
    ("shuffle", r"SHFL", 4),
    ("shared memory", r"LDS|STS|STSM|LDSM", 4),
    ("global memory", r"LDG|STG|RED|ATOM|LD\b|ST\b", 4),
    ("uniform", r"U[A-Z0-9]|R2UR", 1),
    ("wgmma", r"HGMMA", 1),
    ("barriers and waits", r"SYNCS|BAR|WARPGROUP|WARPSYNC|DEPBAR|MEMBAR|FENCE|ERRBAR|BRA|NOP|ELECT|CCTL|BSSY|BSYNC", 1),
]
# This project's acceptance bounds, not from a paper: TFLOP/s at heads of 128, 8,192 tokens, causal
T, BOUNDS = 8192, {"attention_forward_hopper<128>": 560, "attention_backward_hopper<128, 1>": 480}
# FlashAttention-3's published figures on an H100 SXM for the same tokens; backward's is without a causal mask
PUBLISHED = {"attention_forward_hopper<128>": 602, "attention_forward_hopper<64>": 460,
             "attention_backward_hopper<128, 1>": 559}
SHARED_BYTES = 128  # that a multiprocessor reads from shared memory in a cycle
CONSUMERS = 2       # warpgroups of a block; a block fills a multiprocessor
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\d+ )?\s*([A-Z][A-Za-z0-9_.]*)\s*(.*?);")


def functions(program):
    """Yields (name, [(address, predicate, opcode, operands)]) of each kernel for sm_90a."""
    command = ["cuobjdump", "-sass", "-arch", "sm_90a", program]
    text = subprocess.run(command, capture_output=True, text=True, check=True)
    name, code = None, []
    for line in text.stdout.splitlines():
        if "Function :" in line:
            if name:
                yield name, code
            name, code = line.split("Function :")[1].strip(), []
        match = LINE.match(line)
        if match and name:
            address, predicate, opcode, operands = match.groups()
            code.append((int(address, 16), predicate, opcode, operands))
    if name:
        yield name, code


def target(instruction):
    """The address that a branch goes to, or None."""
    _, _, opcode, operands = instruction
    found = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
    return int(found.group(1), 16) if found else None


def loops(code):
    """Yields (first, last) addresses of loops: a branch backwards and where it goes to."""
    for instruction in code:
        to = target(instruction)
        if to is not None and to < instruction[0]:
            yield to, instruction[0]


def shortest_path(code, first, last):
    """The instructions on the shortest way from `first` to the branch at `last`."""
    index = {instruction[0]: i for i, instruction in enumerate(code)}
    best, previous = {index[first]: 0}, {}
    queue = [index[first]]
    while queue:  # breadth first: every edge has length 1
        i = queue.pop(0)
        if code[i][0] == last:
            break
        _, predicate, opcode, _ = code[i]
        to = target(code[i])
        ends = opcode.startswith(("EXIT", "RET")) or (opcode.startswith("BRA") and not predicate)
        nexts = ([] if ends and not predicate else [i + 1]) + ([index[to]] if to in index else [])
        for n in nexts:
            if n < len(code) and n not in best and first <= code[n][0] <= last:
                best[n], previous[n] = best[i] + 1, i
                queue.append(n)
    path, i = [], index[last]
    while i in previous or i == index[first]:
        path.append(code[i])
        if i == index[first]:
            break
        i = previous[i]
    return path[::-1]


def matmul_flops(path):
    """FLOPs of a warpgroup's wgmma instructions."""
    total = 0
    for _, _, opcode, _ in path:
        size = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", opcode)
        if size:
            total += 2 * int(size.group(1)) * int(size.group(2)) * int(size.group(3))
    return total


def wgmma_shared_bytes(path):
    """Bytes that a warpgroup's wgmma instructions read from shared memory: b, and a unless it is in registers."""
    total = 0
    for _, _, opcode, operands in path:
        size = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", opcode)
        if size:
            m, n, k = (int(x) for x in size.groups())
            from_registers = not operands.split(",")[1].strip().startswith("gdesc")
            total += 2 * (n * k + (0 if from_registers else m * k))
    return total


def counts(path):
    by_unit = {unit: [0, 0] for unit, _, _ in UNITS}
    for instruction in path:
        for unit, pattern, cycles in UNITS:
            if re.match(pattern, instruction[2]):
                by_unit[unit][0] += 1
                by_unit[unit][1] += cycles
                break
        else:
            by_unit.setdefault("other", [0, 0])
            by_unit["other"][0] += 1
            by_unit["other"][1] += 1
    return by_unit


def tile_loop(code):
    """(first, last) of the innermost loop that has the most wgmma instructions of any loop without others."""
    found = []
    for first, last in loops(code):
        matmuls = sum(i[2].startswith("HGMMA") and first <= i[0] <= last for i in code)
        path = shortest_path(code, first, last) if matmuls else []
        if path and sum(i[2].startswith("HGMMA") for i in path) == matmuls:
            found.append((last - first, first, last))
    return min(found)[1:]


def program_of(path):
    """The path as what a warpgroup does: matmuls are started in groups and waited for, between them its warps execute
    other instructions, whose cycles are those of issuing them or of the exponentials among them."""
    program, issued, exps = [], 0, 0

    def vector():
        nonlocal issued, exps
        if issued:
            program.append(("vector", max(issued, 8 * exps)))
        issued = exps = 0

    for instruction in path:
        _, _, opcode, operands = instruction
        issued += 1
        exps += opcode.startswith("MUFU")
        if opcode.startswith("HGMMA"):
            vector()
            program.append(("matmul", matmul_flops([instruction]) / TENSOR_FLOPS))
            if "gsb0" in operands:
                program.append(("group", 0))
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            vector()
            program.append(("wait", int(operands.split(",")[1].strip(), 16)))
        elif opcode.startswith(("BAR.SYNC", "BAR.ARV")):
            vector()
            program.append(("meet" if opcode.startswith("BAR.SYNC") else "give", 0))
    vector()
    return program


LATENCY, MEETING = 64, 32  # cycles, assumed: from a matmul's end to its consumer, and of a barrier


def simulated_cycles(program, steps=200):
    """Cycles of a step if both consumers execute the program again and again. The tensor cores compute matmuls in the
    order in which they were started; the other instructions of the two exclude each other. A barrier is a turn that the
    other consumer gives, if the program gives turns, and else both meet there."""
    gives = any(what == "give" for what, _ in program)
    ready, at, groups, open_end = [0.0] * CONSUMERS, [0] * CONSUMERS, [[] for _ in range(CONSUMERS)], [0.0] * CONSUMERS
    tensor = vector = 0.0
    turns, arrived = [[0.0], []], {}
    done = steps * len(program)
    while min(at) < done:
        waiting = []
        for g in range(CONSUMERS):
            if at[g] < done and not (program[at[g] % len(program)][0] == "meet" and gives and not turns[g]):
                if not (g in arrived):
                    waiting.append((ready[g], g))
        _, g = min(waiting)
        what, cycles = program[at[g] % len(program)]
        at[g] += 1
        if what == "vector":
            vector = ready[g] = max(vector, ready[g]) + cycles
        elif what == "matmul":
            tensor = open_end[g] = max(tensor, ready[g]) + cycles
        elif what == "group":
            groups[g].append(open_end[g])
        elif what == "wait":
            while len(groups[g]) > cycles:
                ready[g] = max(ready[g], groups[g].pop(0) + LATENCY)
        elif what == "give":
            turns[1 - g].append(ready[g])
        elif gives:
            ready[g] = max(ready[g], turns[g].pop(0)) + MEETING
        else:
            arrived[g] = ready[g]
            if len(arrived) == CONSUMERS:
                ready = [max(arrived.values()) + MEETING] * CONSUMERS
                arrived = {}
    return max(ready) / steps


def short_name(name):
    """_Z24attention_forward_hopperILi128EEv10HopperCall -> attention_forward_hopper<128>"""
    base, arguments = re.match(r"_Z\d+([a-z_]+?)I((?:Li\d+E)+)E", name).groups()
    return "%s<%s>" % (base, ", ".join(re.findall(r"Li(\d+)E", arguments)))


def report(name, code):
    first, last = tile_loop(code)
    path = shortest_path(code, first, last)
    by_unit, flops = counts(path), CONSUMERS * matmul_flops(path)
    tensor = flops / TENSOR_FLOPS
    limits = {"tensor cores": tensor,
              "shared memory": CONSUMERS * (wgmma_shared_bytes(path) / SHARED_BYTES + by_unit["shared memory"][1]),
              "issue": CONSUMERS * len(path)}
    for unit in ("exp2", "fp32", "min, compare, integer"):
        limits[unit] = CONSUMERS * by_unit[unit][1]
    bound = max(limits.values())
    useful = T / (T + 128)  # of the tiles' pairs, those below the diagonal
    rate = MULTIPROCESSORS * CLOCK / 1e12 * useful
    simulated = simulated_cycles(program_of(path))
    print("\n## %s\n" % short_name(name))
    print("A step of the loop has %d instructions of a warp. The block's two consumers compute %.2f MFLOP by wgmma.\n"
          % (len(path), flops / 1e6))
    print("| unit | instructions of a warp | cycles of a warp | |\n|---|---|---|---|")
    for unit, (count, cycles) in by_unit.items():
        if count:
            print("| %s | %d | %d | |" % (unit, count, cycles))
    print("\n| limit | cycles of a step |\n|---|---|")
    for unit, cycles in limits.items():
        print("| %s | %.0f |" % (unit, cycles))
    print("| **two consumers, simulated** | **%.0f** |" % simulated)
    print("\nThe largest limit gives %.0f TFLOP/s, the simulation %.0f (causal, %d tokens, %.3f GHz)."
          % (flops / bound * rate, flops / simulated * rate, T, CLOCK / 1e9), end="")
    share = 100 * simulated / flops / rate
    if short_name(name) in BOUNDS:
        least = BOUNDS[short_name(name)]
        print(" %d TFLOP/s, this project's bound, are %.0f %% of it." % (least, share * least), end="")
    if short_name(name) in PUBLISHED:
        published = PUBLISHED[short_name(name)]
        print(" FlashAttention-3's published %d TFLOP/s are %.0f %%." % (published, share * published), end="")
    print()


def main():
    print("# Attention on a Hopper GPU: instructions of a tile, and what they allow\n")
    print("These are counts, and [roofline-gpu.md](roofline-gpu.md) has what an H200 measured. "
          "`dev/attention_sass.py` counted instructions of machine code, on the way through the loop that masks and "
          "rescales nothing. Cycles are those of one of the four parts of a "
          "multiprocessor, each of which has a warp of either consumer. The simulation lets both consumers execute the "
          "loop: the tensor cores compute matmuls in the order in which they were started, the warps' other "
          "instructions exclude each other, a matmul's result is there %d cycles after its end, and a barrier takes "
          "%d. It knows nothing of throttled clocks, the L2 cache or conflicts in shared memory." % (LATENCY, MEETING))
    print()
    kernels = [(n, c) for n, c in functions(sys.argv[1]) if "hopper" in n and any(i[2].startswith("HGMMA") for i in c)]
    for name, code in sorted(kernels):
        report(name, code)


main()
