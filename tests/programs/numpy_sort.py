"""Sorts an array of argv[1] MiB of doubles, writes it with argv[2] != 0, and prints what identifies it."""
import hashlib
import sys

import numpy

count = int(sys.argv[1]) * (1 << 20) // 8
array = numpy.random.default_rng(20240229).random(count)
print("sum", "%.17g" % array[::1024].sum())
array.sort()
print("ends", repr(float(array[0])), repr(float(array[-1])))
assert bool((array[1:] >= array[:-1]).all()), "not sorted"
print("sha", hashlib.sha256(array.data).hexdigest())
# The kernel reads evicted memory here: write(2) straight from the array.
array[: len(array) // 4].tofile("sorted.bin")
array = array.reshape(-1, 1024)[::-1].copy()
print("again", hashlib.sha256(array.data).hexdigest())
