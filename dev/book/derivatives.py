#!/usr/bin/env python3
"""derivatives.py: compares each derivative of docs/book/01-block.md with central differences, in double precision.

    python3 dev/book/derivatives.py

Every function below is written as on the page, without a library. A loss is made of each op's outputs by a fixed random
weight per output; these weights are the gradient that reaches the op from above.
"""

import math
import random
import sys

STEP = 1e-5  # of the central differences
BOUND = 1e-8  # allowed error, relative to the largest element of the gradient
EPS, HD, G, T = 1e-5, 4, 2, 5  # RMSNorm's epsilon; head dimension, query heads of a group, tokens


def numbers(random_numbers, count):
    return [random_numbers.uniform(-1, 1) for _ in range(count)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def rows(x, width):
    return [x[i : i + width] for i in range(0, len(x), width)]


# Each op: forward(inputs) returns the outputs, backward(inputs, d_out) the gradient of each input. All are flat lists.


def linear(inputs, n=3, c=4):
    x, w = inputs
    return [dot(x_row, w_row) for x_row in rows(x, c) for w_row in rows(w, c)]


def linear_backward(inputs, dy, n=3, c=4):
    x, w = inputs
    outputs = len(w) // c
    dx = [sum(dy[i * outputs + o] * w[o * c + j] for o in range(outputs)) for i in range(n) for j in range(c)]
    dw = [sum(dy[i * outputs + o] * x[i * c + j] for i in range(n)) for o in range(outputs) for j in range(c)]
    return [dx, dw]


def rmsnorm(inputs):
    x, w = inputs
    r = 1 / math.sqrt(dot(x, x) / len(x) + EPS)
    return [x[i] * r * w[i] for i in range(len(x))]


def rmsnorm_backward(inputs, d_out):
    x, w = inputs
    r = 1 / math.sqrt(dot(x, x) / len(x) + EPS)
    y = [value * r for value in x]
    g = [d_out[i] * w[i] for i in range(len(x))]
    mean = dot(g, y) / len(x)
    return [[r * (g[i] - y[i] * mean) for i in range(len(x))], [d_out[i] * y[i] for i in range(len(x))]]


def rope(inputs, direction=1, position=3):
    x, half, out = inputs[0], len(inputs[0]) // 2, [0.0] * len(inputs[0])
    for i in range(half):
        angle = direction * position * 500000 ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rope_backward(inputs, d_out):
    return [rope([d_out], direction=-1)]


def probabilities(q_row, keys, i):
    scores = [dot(q_row, keys[j]) / math.sqrt(HD) for j in range(i + 1)]
    lse = math.log(sum(math.exp(s) for s in scores))
    return [math.exp(s - lse) for s in scores]


def attention(inputs):
    q, k, v = (rows(x, HD) for x in inputs)  # q: token i, head h is row i * G + h
    out = []
    for row in range(T * G):
        p = probabilities(q[row], k, row // G)
        out += [sum(p[j] * v[j][e] for j in range(len(p))) for e in range(HD)]
    return out


def attention_backward(inputs, d_out):
    q, k, v = (rows(x, HD) for x in inputs)
    out, do = rows(attention(inputs), HD), rows(d_out, HD)
    dq, dk, dv = ([[0.0] * HD for _ in x] for x in (q, k, v))
    for row in range(T * G):
        p, d = probabilities(q[row], k, row // G), dot(do[row], out[row])
        for j in range(len(p)):
            ds = p[j] * (dot(do[row], v[j]) - d) / math.sqrt(HD)
            for e in range(HD):
                dv[j][e] += p[j] * do[row][e]
                dq[row][e] += ds * k[j][e]
                dk[j][e] += ds * q[row][e]
    return [sum(x, []) for x in (dq, dk, dv)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def swiglu(inputs):
    return [g * sigmoid(g) * u for g, u in zip(*inputs)]


def swiglu_backward(inputs, dh):
    gate, up = inputs
    s = [sigmoid(g) for g in gate]
    d_gate = [dh[i] * up[i] * (s[i] + gate[i] * s[i] * (1 - s[i])) for i in range(len(gate))]
    return [d_gate, [dh[i] * gate[i] * s[i] for i in range(len(gate))]]


def cross_entropy(inputs, target=2):
    z = inputs[0]
    return [math.log(sum(math.exp(x) for x in z)) - z[target]]


def cross_entropy_backward(inputs, d_out, target=2):
    total = sum(math.exp(x) for x in inputs[0])
    return [[d_out[0] * (math.exp(x) / total - (i == target)) for i, x in enumerate(inputs[0])]]


def difference(forward, inputs, d_out, which, at):
    """The derivative of the loss by one element, as a central difference."""
    losses = []
    for step in (STEP, -STEP):
        moved = [list(x) for x in inputs]
        moved[which][at] += step
        losses.append(dot(d_out, forward(moved)))
    return (losses[0] - losses[1]) / (2 * STEP)


def largest_error(forward, backward, sizes):
    random_numbers = random.Random(1)
    inputs = [numbers(random_numbers, size) for size in sizes]
    d_out = numbers(random_numbers, len(forward(inputs)))
    error, largest = 0.0, 0.0
    for which, gradient in enumerate(backward(inputs, d_out)):
        for at, value in enumerate(gradient):
            error = max(error, abs(value - difference(forward, inputs, d_out, which, at)))
            largest = max(largest, abs(value))
    return error / largest


OPS = [
    ("linear layer", linear, linear_backward, (12, 8)),
    ("RMSNorm", rmsnorm, rmsnorm_backward, (8, 8)),
    ("RoPE", rope, rope_backward, (8,)),
    ("attention", attention, attention_backward, (T * G * HD, T * HD, T * HD)),
    ("SwiGLU", swiglu, swiglu_backward, (6, 6)),
    ("cross-entropy", cross_entropy, cross_entropy_backward, (7,)),
]


def main():
    failed = 0
    for name, forward, backward, sizes in OPS:
        error = largest_error(forward, backward, sizes)
        failed += error > BOUND
        print(f"{'pass' if error <= BOUND else 'FAIL'} {name}: error {error:.1e} of at most {BOUND:.0e}")
    print(f"\n{len(OPS) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
