"""Builds dictionaries, lists and strings of about argv[1] MiB, walks and changes them, prints sums."""
import sys

megabytes = int(sys.argv[1])
count = megabytes * 2800

# One record costs about 370 bytes: key, value, tuple, slots of the dictionary and of the list.
table = {}
order = []
for i in range(count):
    key = "key-%09d" % (i * 2654435761 % 1000000007)
    table[key] = (i, str(i) * 3, float(i))
    order.append(key)
print("built", len(table), len(order))

for turn in range(2):
    total = 0
    for key in order:
        value = table[key]
        total = (total * 31 + value[0] + len(value[1]) + int(value[2])) % 1000000007
    print("walk", turn, total)

# Leave holes, fill them with something else, so that freed memory is used again.
for key in order[::3]:
    del table[key]
nested = [[i, [i * j for j in range(4)]] for i in range(count // 8)]
print("nested", sum(inner[1][3] for inner in nested) % 1000000007)

total = 0
for key in sorted(table)[:: max(1, count // 50000)]:
    total = (total * 33 + hash(table[key][1]) + table[key][0]) % 1000000007
print("sorted", total)
