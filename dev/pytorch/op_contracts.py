"""op_contracts.py: the contracts of the ops, parsed from lib/ops/ops.h, and the shared libraries of `make ops`.

Everything that other files know about the C functions comes from here: names, parameters, and the comment that says
what is computed. So it cannot differ from what the program calls. Only Python's standard library is needed.
"""

import ctypes
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = ROOT / "lib" / "ops" / "ops.h"
PRECISIONS = ("fp32", "bf16")
HANDLE_FUNCTIONS = ("open", "close", "use_stream", "cost", "struct_bytes")


class LibraryError(RuntimeError):
    """A shared library is missing or was built from another lib/ops/ops.h; the message says what to do."""


class AttentionShape(ctypes.Structure):  # lib/ops/ops_common.h
    _fields_ = (
        [(name, ctypes.c_int) for name in "B Tq Tk NH NKV HD q_offset q_split q_gap".split()]
        + [(name, ctypes.c_void_p) for name in ("q_doc", "k_doc")]
        + [(name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "o_stride")]
    )


class ZLoss(ctypes.Structure):  # lib/ops/ops_common.h
    _fields_ = [("weight", ctypes.c_float), ("losses", ctypes.c_void_p)]


class Logits(ctypes.Structure):  # lib/ops/ops_common.h
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int)]


EXACT_WORDS = 11  # an ExactSum (lib/device/base.h): ten digits and the number of values that were not finite
SPINS = "2000"  # of a waiting OpenMP thread, before it sleeps
INT8_BLOCK = 64  # elements of an int8 tensor that share a scale (lib/device/base.h)
C_TYPES = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "Dtype": ctypes.c_int,
    "ZLoss": ZLoss,
    "Logits": Logits,
}


@dataclass(frozen=True)
class Parameter:
    type: str  # as in C, without the asterisk of a pointer
    name: str
    is_pointer: bool
    is_const: bool

    @property
    def ctype(self):
        return ctypes.c_void_p if self.is_pointer else C_TYPES[self.type]


@dataclass(frozen=True)
class Contract:
    name: str
    section: str  # the heading in lib/ops/ops.h under which the op is
    comment: str  # what it computes, with shapes and sources
    parameters: tuple  # of Parameter, without the device
    declaration: str

    @property
    def text(self):
        return f"{self.declaration}\n{textwrap.indent(self.comment, '    ')}"


def parse_parameter(text):
    match = re.fullmatch(r"(const )?(\w+) (\*?)(\w+)", text.strip())
    if not match:
        raise LibraryError(f"{HEADER}: the parameter '{text}' is not understood: extend parse_parameter")
    return Parameter(match[2], match[4], bool(match[3]), bool(match[1]))


def plain_comment(text):
    """A C comment without its marks."""
    lines = [re.sub(r"^ \* ?", "", line) for line in text.split("\n")]
    return "\n".join(lines).strip()


def read_contracts(path=HEADER):
    """All ops of lib/ops/ops.h by name: functions `static void NAME(Device *dev, …)`, except those that open and close,
    and linear_matmul, which the linear layers share."""
    heading = r"^// -{20,}\n// (?P<section>[^\n]*)\n"
    comment = r"(?:^/\* (?P<comment>(?:(?!\*/).)*?) ?\*/\n)?"
    function = r"^static void (?P<name>\w+)\(Device \*dev, (?P<parameters>[^)]*)\) \{"
    contracts, section = {}, ""
    for match in re.finditer(f"{heading}|{comment}{function}", path.read_text(), re.M | re.S):
        if match["section"]:
            section = match["section"]
            continue
        name, parameters = match["name"], " ".join(match["parameters"].split())
        if name.startswith("ops_") or name == "linear_matmul":
            continue
        if not match["comment"]:
            raise LibraryError(f"{path}: {name} has no contract: write the comment above it")
        whole = f"{name}({parameters})".replace(" ", "\0").replace(",\0", ", ")  # lines end after a comma
        declaration = textwrap.fill(whole, 110, subsequent_indent=" " * (len(name) + 1)).replace("\0", " ")
        parsed = tuple(parse_parameter(p) for p in parameters.split(", "))
        contracts[name] = Contract(name, section, plain_comment(match["comment"]), parsed, declaration)
    return contracts


CONTRACTS = read_contracts()


def print_contracts(callers=None):
    """Every op's C contract, and below it those of `callers` (names by op), if given."""
    section = None
    for contract in CONTRACTS.values():
        if contract.section != section:
            section = contract.section
            print(f"---- {section}\n")
        print(contract.text)
        print("".join(f"    {caller}\n" for caller in callers[contract.name]) if callers else "")


# ---------------------------------------------------------------- the shared libraries


def library_path(device_type):
    """The library for tensors of this device type."""
    return ROOT / "build" / ("libllama3_ops_cuda.so" if device_type == "cuda" else "libllama3_ops.so")


def limit_spinning():
    """Lets waiting OpenMP threads sleep soon, as run/setup/launch.h does; a user's own setting is left alone. It must
    be called before an OpenMP library is loaded: by default, waiting threads spin on cores that other threads need."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


class Library:
    """One precision of a shared library. Calls on one handle must not overlap."""

    def __init__(self, path, precision, threads, gpu=0):
        if not Path(path).exists():
            raise LibraryError(f"{path} does not exist: build it with `make ops`")
        limit_spinning()
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryError(f"{path} cannot be loaded ({error}): build it again with `make ops`") from None
        self.path, self.precision = path, precision
        self.functions = {name: self.find(loaded, name) for name in CONTRACTS}
        for name, contract in CONTRACTS.items():
            self.functions[name].argtypes = [ctypes.c_void_p] + [p.ctype for p in contract.parameters]
        for name in HANDLE_FUNCTIONS:
            self.functions[name] = self.find(loaded, name)
        for which, struct in enumerate((AttentionShape, ZLoss, Logits, ctypes.c_uint64 * EXACT_WORDS)):
            if self.functions["struct_bytes"](which) != ctypes.sizeof(struct):
                raise LibraryError(f"{path} has another layout of struct {which} than op_contracts.py: correct it here")
        self.functions["open"].restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(self.functions["open"](threads, gpu))

    def find(self, loaded, name):
        try:
            function = loaded[f"llama3_{self.precision}_{name}"]  # its own object, unlike an attribute's
        except AttributeError:
            message = f"{self.path} has no {name} in {self.precision}: build it again with `make ops`"
            raise LibraryError(message) from None
        function.restype = None if name != "struct_bytes" else ctypes.c_int
        return function

    def __call__(self, name, *arguments):
        self.functions[name](self.handle, *arguments)

    def use_stream(self, stream):
        self.functions["use_stream"](self.handle, ctypes.c_void_p(stream))

    def cost(self):
        """FLOPs and bytes of the last call, as lib/ops/ops.h counts them."""
        flops, size = ctypes.c_double(), ctypes.c_double()
        self.functions["cost"](self.handle, ctypes.byref(flops), ctypes.byref(size))
        return flops.value, size.value

    def close(self):
        self.functions["close"](self.handle)


def exported_names():
    """What the shared library of `make ops` exports."""
    names = [*CONTRACTS, *HANDLE_FUNCTIONS]
    return sorted(f"llama3_{precision}_{name}" for precision in PRECISIONS for name in names)


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        print("\n".join(exported_names()))
    else:
        print_contracts()
