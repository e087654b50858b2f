#!/usr/bin/env python3
"""bf16.py: what 8 significant bits do to a sum and to a slowly changing weight (docs/book/03-one-rank.md)."""

import struct


def bf16(x):
    """The nearest bf16; ties go to the even one."""
    bits = struct.unpack("I", struct.pack("f", x))[0]
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", rounded))[0]


def main():
    total, weight = 0.0, bf16(0.02)
    for _ in range(1000):
        total = bf16(total + 1)
    print(f"the sum of 1,000 ones is {total:.0f}")
    for update in (8e-5, 5e-5, 8e-7):
        print(f"adding {update:.0e} to {weight:.5f} changes it by {bf16(weight + update) - weight:.1e}")


if __name__ == "__main__":
    main()
