"""Keeps a day of a web server's requests in memory, argv[1] MiB of them, and answers questions about it, each by
one walk through all of them. Made for `./demo`; says the same on every run."""
import hashlib
import sys

# A request takes about 350 bytes: the tuple, its numbers, its texts.
count = int(sys.argv[1]) * 2900
seconds = 86400

requests = []
state = 1
for number in range(count):
    state = state * 6364136223846793005 % (1 << 64)
    page = "/page/%d/section/%d" % ((state >> 40) % 5000, number % 97)
    client = "10.%d.%d.%d" % ((state >> 56), (state >> 48) % 256, (state >> 33) % 256)
    took = (state >> 20) % 100000 / 1000
    requests.append((number * seconds // count, client, page, 200 if state >> 59 else 404, took, (state >> 30) % 65536))
print(len(requests), "requests")

hours = [0] * 24
for at, client, page, status, took, size in requests:
    hours[at // 3600] += size
print("bytes by hour:", *(size >> 20 for size in hours))

missing = {}
for at, client, page, status, took, size in requests:
    if status == 404:
        missing[page] = missing.get(page, 0) + 1
print("missing most often:", *sorted(missing, key=lambda page: (-missing[page], page))[:3])

slowest = max(requests, key=lambda request: request[4])
print("slowest: %s in %.1f ms" % (slowest[2], slowest[4]))

digest = hashlib.sha256()
for request in requests:
    digest.update(repr(request).encode())
print("sha256 of them all:", digest.hexdigest())
