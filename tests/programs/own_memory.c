/* Has memset, memcpy and memmove of its own, as programs built with sanitizers have: they count in memory that may be
   out. Whoever calls them for the engine waits for itself. cc -O1 -fno-builtin -rdynamic */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static const size_t COUNTS = 32ul << 20;
static unsigned char *counts;

static void count(void *at, size_t len) {
    if (counts && len) counts[((unsigned long)at * 2654435761u >> 7) % COUNTS]++;
}

void *memset(void *to, int value, size_t len) {
    count(to, len);
    for (volatile char *at = to; len--;) *at++ = value;
    return to;
}

void *memmove(void *to, const void *from, size_t len) {
    volatile char *at = to;
    const char *source = from;
    count(to, len);
    if (at < source)
        while (len--) *at++ = *source++;
    else
        while (len--) at[len] = source[len];
    return to;
}

void *memcpy(void *to, const void *from, size_t len) { return memmove(to, from, len); }

int main(void) {
    size_t len = 64ul << 20;
    unsigned char *data = malloc(len);
    unsigned long sum = 0;
    counts = mmap(0, COUNTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < len; at += 64) data[at] = at >> 6;
    for (size_t at = 0; at < COUNTS; at += 4096) counts[at] = 0;
    for (int round = 0; round < 3; round++)
        for (size_t at = 0; at < len; at += 64) sum = sum * 31 + data[at];
    printf("%lu\n", sum);
    return 0;
}
