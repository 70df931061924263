"""Builds about argv[1] MiB, then has argv[2] workers, made by fork, read all of it and build their own."""
import hashlib
import multiprocessing
import sys

megabytes, workers = int(sys.argv[1]), int(sys.argv[2])
PARTS = 64


def text(part, i):
    return b"%d-%d-" % (part, i) + hashlib.sha256(b"%d %d" % (part, i)).digest() * 14


def look(turn_and_part):
    """All of a part, which also counts references in it; and something of the worker's own."""
    turn, part = turn_and_part
    digest = hashlib.sha256()
    for i, (number, piece) in enumerate(data[part]):
        assert number == i
        digest.update(piece)
    own = [(turn, piece[i % 400:]) for i, (_, piece) in enumerate(data[(part * 7 + turn) % PARTS])]
    digest.update(b"%d" % sum(len(piece) for _, piece in own))
    return digest.hexdigest()


# A record costs about 600 bytes.
data = [[(i, text(part, i)) for i in range(megabytes * 1750 // PARTS)] for part in range(PARTS)]
print("built", sum(map(len, data)))
with multiprocessing.get_context("fork").Pool(workers) as pool:
    for turn in range(2):
        found = pool.map(look, [(turn, part) for part in range(PARTS)], chunksize=1)
        # What comes back is what was inherited, as the parent sees it now.
        print(turn, hashlib.sha256("".join(found).encode()).hexdigest())
print("own", hashlib.sha256("".join(map(look, [(0, part) for part in range(PARTS)])).encode()).hexdigest())
