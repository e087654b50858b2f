#!/usr/bin/env python3
"""loads.py PROGRAM…: whether loads of the CUDA kernels are in flight together, as their comments say.

PROGRAM is a CUDA build with code for sm_90a, or a cubin. Needs cuobjdump and nvdisasm in the PATH (PyPI:
nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). Of each kernel's machine code the script keeps the order of what matters:
a global load by its bits, STG, SHFL and BAR (repeats left out), and `|` where the kernel waits for a load, because an
instruction reads its result. Each claim is a regular expression over these words. ptxas is free to move loads, so a
change of a kernel or of the compiler can break a claim without changing any result.
"""
import re
import subprocess
import sys

CLAIMS = [  # part of the mangled name, the words that must occur, what that means
    ("rmsnorm_backward_kernelILi[48]E", "128 128 128 SHFL BAR", "the next row's loads come before the row's sum"),
    ("rmsnorm_dw_kernel", "(32 ){16}", "16 rows of partial sums at once"),
    ("squared_norm_kernelILi4E", "(128 ){4}", "4 blocks of elements at once"),
    ("rope_kernelILi[48]E", r"^128 128 32 \|", "x is loaded before the position, and the angles last"),
    ("embedding_backward_kernelILi4E", "(128 ){8}", "4 rows of dx and of dembed at once"),
    ("embedding_backward_kernelILi8E", "(128 ){12}", "4 rows of dx and of dembed at once"),
    ("attention_backward_prepareILi(8|16)E", "^STG (32 )*(128 (32 )*){8}", "zeros first, then 4 rows at once"),
    ("attention_backward_round_dq", "(128 ){8}", "all sums of a thread at once"),
]
LINE = re.compile(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z][A-Za-z0-9_.]*)\s*(.*?);")


def registers(operands):
    """The registers that an instruction names; a 64-bit address has two."""
    found = set()
    for number, wide in re.findall(r"\bR(\d+)(?:\.reuse)?(\.64)?", operands):
        found.update(range(int(number), int(number) + (2 if wide else 1)))
    return found


def words(code):
    text, loading = [], set()
    for opcode, operands in code:
        kind = opcode.split(".")[0]
        if kind == "LDG":
            bits = next((int(b) for b in opcode.split(".") if b in ("64", "128")), 32)
            to, _, address = operands.partition(",")
            first = int(to.strip()[1:])
            result = set(range(first, first + bits // 32))
            waits = loading & (registers(address) | result)
        else:
            waits = loading & registers(operands)
        if waits:
            text.append("|")
            loading = set()
        if kind == "LDG":
            text.append(str(bits))
            loading |= result
        elif kind in ("STG", "SHFL", "BAR") and text[-1:] != [kind]:
            text.append(kind)
    return " ".join(text) + " "


def kernels(program):
    """Yields (mangled name, [(opcode, operands)])."""
    command = ["cuobjdump", "-sass", "-arch", "sm_90a", program]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in text.split("Function :")[1:]:
        lines = (LINE.match(line) for line in part.splitlines())
        yield part.split()[0], [match.groups() for match in lines if match]


def main():
    failed, held = 0, [0] * len(CLAIMS)
    for program in sys.argv[1:]:
        for name, code in kernels(program):
            for i, (kernel, claim, meaning) in enumerate(CLAIMS):
                if not re.search(kernel, name):
                    continue
                held[i] += 1
                if not re.search(claim, words(code)):
                    failed += 1
                    print("%s of %s: %s: expected '%s' in '%s'" % (name, program, meaning, claim, words(code)[:400]))
    for (kernel, _, _), count in zip(CLAIMS, held):
        if not count:
            failed += 1
            print("no kernel is named like '%s'" % kernel)
    print("%d kernels, %d loads not where the source claims" % (sum(held), failed))
    sys.exit(failed > 0)


main()
