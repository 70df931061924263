/* Fills four times the limit and reads it back, from two threads; asks for what must be refused. With an argument the
 * threads answer their own faults. */
#define _POSIX_C_SOURCE 200809L
#include "pageout.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define LIMIT (16 * MIB)
#define LENGTH (4 * LIMIT)
#define PAGE ((size_t)4096)

#define CHECK(what)                                                                        \
    do {                                                                                   \
        if (!(what)) {                                                                     \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, pageout_error()); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static void *fill_and_verify(void *argument)
{
    char *half = argument;
    for (size_t at = 0; at < LENGTH / 2; at += PAGE)
        memset(half + at, (int)(at / PAGE % 251 + 1), PAGE);
    for (size_t at = 0; at < LENGTH / 2; at += PAGE) {
        char wanted = (char)(at / PAGE % 251 + 1);
        CHECK(half[at] == wanted && half[at + PAGE - 1] == wanted);
    }
    return NULL;
}

/* A page that is out goes to a system call when it is pinned. */
static void write_pinned(pageout *swap, char *region)
{
    int ends[2];
    char *out = NULL;
    CHECK(pipe(ends) == 0);
    for (char *at = region; at < region + LENGTH && out == NULL; at += PAGE)
        if (write(ends[1], at, 1) == -1 && errno == EFAULT)
            out = at;
    CHECK(out != NULL);
    CHECK(pageout_pin(swap, out, PAGE) == 0);
    CHECK(write(ends[1], out, PAGE) == (ssize_t)PAGE);
    CHECK(pageout_unpin(swap, out, PAGE) == 0);
    CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
}

static pthread_key_t at_end;

/* What a thread cleans up last, when the library has forgotten this thread. */
static void use_at_end(void *swap)
{
    char *region = pageout_map(swap, PAGE);
    CHECK(region != NULL && region[PAGE - 1] == 0);
    CHECK(pageout_unpin(swap, region, PAGE) == -1);
    CHECK(strlen(pageout_error()) > 0);
    CHECK(pageout_unmap(swap, region) == 0);
}

static void *fail_and_end(void *swap)
{
    CHECK(pthread_setspecific(at_end, swap) == 0);
    CHECK(pageout_map(swap, 0) == NULL);
    return NULL;
}

/* It was cancelled amid opening or closing, and two descriptors stayed open, or all was aborted. */
static void *open_though_cancelled(void *result)
{
    const char *device = "mem,size=64M";
    pthread_cancel(pthread_self());
    pageout *swap = pageout_open_inline(LIMIT, &device, 1);
    pageout_close(swap);
    *(int *)result = swap != NULL;
    return NULL;
}

int main(int count, char **arguments)
{
    (void)arguments;
    const char *devices[] = {"mem,size=256M"};
    CHECK(pageout_open(4096, devices, 1) == NULL);
    CHECK(strstr(pageout_error(), "least that works") != NULL);
    CHECK(pageout_open(LIMIT, NULL, 1) == NULL && strstr(pageout_error(), "NULL") != NULL);
    devices[0] = NULL;
    CHECK(pageout_open(LIMIT, devices, 1) == NULL && strstr(pageout_error(), "NULL") != NULL);
    devices[0] = "mem,size=256M";

    int is_inline = count > 1;
    pageout *swap = (is_inline ? pageout_open_inline : pageout_open)(LIMIT, devices, 1);
    if (swap == NULL && strstr(pageout_error(), "userfaultfd") != NULL) {
        printf("skipped: %s\n", pageout_error());
        return 77;
    }
    CHECK(swap != NULL);
    char *region = pageout_map(swap, LENGTH);
    CHECK(region != NULL && (size_t)region % (2 * MIB) == 0);

    pthread_t other;
    CHECK(pthread_create(&other, NULL, fill_and_verify, region) == 0);
    fill_and_verify(region + LENGTH / 2);
    CHECK(pthread_join(other, NULL) == 0);

    if (is_inline)
        write_pinned(swap, region);
    CHECK(pageout_pin(swap, region + MIB, 2 * MIB) == 0);
    CHECK(pageout_unmap(swap, region) == -1);
    CHECK(strstr(pageout_error(), "pageout_unpin") != NULL);
    CHECK(pageout_unpin(swap, region + MIB, 2 * MIB) == 0);
    CHECK(pageout_unpin(swap, region + MIB, 2 * MIB) == -1);
    CHECK(pageout_pin(swap, region, LENGTH) == -1);

    CHECK(pageout_advise(swap, region, MIB, PAGEOUT_WILLNEED) == 0);
    CHECK(pageout_advise(swap, region, MIB, PAGEOUT_COLD) == 0);
    CHECK(pageout_advise(swap, region, MIB, PAGEOUT_DONTNEED) == 0);
    CHECK(region[0] == 0 && region[MIB] != 0);
    CHECK(pageout_advise(swap, region, MIB, 99) == -1);
    CHECK(pageout_advise(swap, region + 1, LENGTH, PAGEOUT_COLD) == -1);

    struct pageout_stats stats;
    CHECK(pageout_stats(swap, &stats, sizeof stats) == 0);
    CHECK(stats.limit_bytes == LIMIT && stats.out_bytes > LIMIT && stats.lost_bytes == 0 && stats.full == 0);
    CHECK(stats.resident_peak_bytes < 2 * LIMIT);

    CHECK(pageout_unmap(swap, region + PAGE) == -1);
    CHECK(pageout_unmap(swap, region) == 0);
    CHECK(pageout_map(swap, 0) == NULL);
    CHECK(pageout_map(swap, 5) != NULL);

    CHECK(pthread_key_create(&at_end, use_at_end) == 0);
    CHECK(pthread_create(&other, NULL, fail_and_end, swap) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    if (is_inline) {
        int opened = 0;
        CHECK(pthread_create(&other, NULL, open_though_cancelled, &opened) == 0);
        CHECK(pthread_join(other, NULL) == 0);
        CHECK(opened);
    }
    pageout_close(swap);
    pageout_close(NULL);
    return 0;
}
