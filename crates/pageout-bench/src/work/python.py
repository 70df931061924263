# Builds dictionaries and lists, walks them in order and at random, and checks every datum met.
import json, sys, time

count, walks = int(sys.argv[1]), int(sys.argv[2])
begun = time.monotonic()
table = {}
for i in range(count):
    table[i * 7 + 1] = [i, i * 3 + (1 << 40), "item %d" % i]
built = time.monotonic()

for _ in range(walks):
    total = 0
    for key, (i, three, text) in table.items():
        if key != i * 7 + 1 or three != i * 3 + (1 << 40) or len(text) < 6:
            sys.exit("python: data error at key %d" % key)
        total += i
    if total != count * (count - 1) // 2:
        sys.exit("python: data error: the walk's sum is %d" % total)
walked = time.monotonic()

state, total = 12345, 0
for _ in range(count // 8):
    state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
    i = (state >> 20) % count
    entry = table[i * 7 + 1]
    if entry[0] != i or entry[1] != i * 3 + (1 << 40) or entry[2] != "item %d" % i:
        sys.exit("python: data error at item %d" % i)
    entry[0] = i + 0
    total = (total * 31 + entry[1]) % (1 << 61)
ended = time.monotonic()

print(json.dumps({"metrics": {
    "python.seconds": ended - begun,
    "python.build_s": built - begun,
    "python.walk_s": walked - built,
    "python.random_s": ended - walked,
    "python.checksum": total % (1 << 32),
}}))
