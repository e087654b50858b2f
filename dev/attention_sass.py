#!/usr/bin/env python3
"""attention_sass.py PROGRAM: what the machine code of attention's Hopper kernels makes of one tile, and what follows.

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
    ("fp32", r"FFMA|FADD|FMUL|IMAD|MOV", 1),
    ("min, compare, integer", r"FMNMX|FSETP|FSEL|ISETP|LOP3|IADD|SHF|SEL|PLOP3|LEA|PRMT|VOTE|R2P|P2R|CS2R|S2R", 2),
    ("conversion", r"F2F|I2F|F2I", 2),
    ("shuffle", r"SHFL", 4),
    ("shared memory", r"LDS|STS|STSM|LDSM", 4),
    ("global memory", r"LDG|STG|RED|ATOM|LD\b|ST\b", 4),
    ("uniform", r"U[A-Z0-9]|R2UR", 1),
    ("wgmma", r"HGMMA", 1),
    ("barriers and waits", r"SYNCS|BAR|WARPGROUP|WARPSYNC|DEPBAR|MEMBAR|FENCE|ERRBAR|BRA|NOP|ELECT|CCTL|BSSY|BSYNC", 1),
]
# The least that a kernel must reach to be worth its place, TFLOP/s at heads of 128, 8,192 tokens, causal
T, BOUNDS = 8192, {"attention_forward_hopperILi128E": 560, "attention_backward_hopperILi128ELi1E": 480}
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
    peak = flops / bound * MULTIPROCESSORS * CLOCK / 1e12 * useful
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
    print("\nThe largest gives %.0f TFLOP/s, causal, %d tokens, at %.3f GHz." % (peak, T, CLOCK / 1e9), end="")
    for key, least in BOUNDS.items():
        if key in name:
            print(" %d TFLOP/s need %.0f %% of it." % (least, 100 * least / peak), end="")
    print()


def main():
    print("# Attention on a Hopper GPU: instructions of a tile, and what they allow\n")
    print("Nothing here was measured on a GPU. `dev/attention_sass.py` counted the instructions of the machine code.")
    kernels = [(n, c) for n, c in functions(sys.argv[1]) if "hopper" in n and any(i[2].startswith("HGMMA") for i in c)]
    for name, code in sorted(kernels):
        report(name, code)


main()
