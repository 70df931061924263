# Fills associative arrays with `count` records, then walks them in an order of its own.
BEGIN {
    for (i = 0; i < count; i++) {
        key = (i * 48271) % 2147483647
        name[key] = "name " i " of " count
        next_of[i] = key
    }
    sum = 0
    for (i = count - 1; i >= 0; i--) {
        sum = (sum * 31 + length(name[next_of[i]]) + next_of[i]) % 1000000007
    }
    print count, sum
    for (i = 0; i < count; i += 3) {
        delete name[next_of[i]]
    }
    left = 0
    for (key in name) left++
    print left
    for (i = 0; i < count; i += 1000) {
        print i, next_of[i], ((next_of[i] in name) ? name[next_of[i]] : "gone")
    }
}
