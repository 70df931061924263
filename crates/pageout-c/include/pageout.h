/*
 * pageout: memory that is larger than what it may take. The rest lies on a file, a disk or in memory elsewhere.
 *
 * Link with -lpageout_c (shared), or with libpageout_c.a and -lpthread -ldl -lm.
 *
 * Lengths and sizes are bytes. Every function may be called by any thread, at the same time by several; none may be called in a
 * signal handler, nor be left by a jump (siglongjmp). After a fork everything here is the parent's: in the child regions are not
 * mapped, and all calls fail but pageout_close(), pageout_stats() and the two that open.
 *
 * Functions that return int return 0, or -1 on failure; those that return a pointer return NULL on failure.
 * pageout_error() then says what failed, on what, why, and what to do, in one line. Nothing has changed then, but
 * where bytes were to come in or be given up: some may have been.
 *
 * Needs Linux 6.8 or later and, but for pageout_open_inline(), read and write access to /dev/userfaultfd, or more
 * rights. A seccomp filter on all threads (TSYNC) is on the engine's too: a touch of what is out waits for ever where that may not
 * call what it needs (ioctl, ppoll, read, futex, madvise, mprotect, mremap, and what devices take). One on some threads is none on the engine.
 */
#ifndef PAGEOUT_H
#define PAGEOUT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A limit with its devices and its engine. Any number of them may be open, 64 by pageout_open_inline(). */
typedef struct pageout pageout;

/* What pageout_advise() takes. */
enum pageout_advice {
    /* Used soon: what is out comes in before the call returns, at most half of the limit. */
    PAGEOUT_WILLNEED = 1,
    /* Not needed any more: whole pages inside the range read as zeros from here on, and are not in memory, pinned or not. */
    PAGEOUT_DONTNEED = 2,
    /* Not used soon: leaves when its turn comes, however often it was used. */
    PAGEOUT_COLD = 3
};

/* All values are since pageout_open(), or now. */
struct pageout_stats {
    /* The limit. */
    uint64_t limit_bytes;
    /* In memory at the last look (up to 64 ms ago), the engine's frames included; and the most so far. */
    uint64_t resident_bytes;
    uint64_t resident_peak_bytes;
    /* On devices at the last look. */
    uint64_t swapped_bytes;
    /* Read from and written to devices. */
    uint64_t in_bytes;
    uint64_t out_bytes;
    /* Faults answered, and of these the ones that needed a device. */
    uint64_t faults;
    uint64_t major_faults;
    /* Bytes that could not be brought back; touching them raises SIGBUS until they are given up. */
    uint64_t lost_bytes;
    /* 1: a page has found no room on any device, and memory grows beyond the limit. Where writes fail it grows, too, and
     * this stays 0: see write_errors. In a fork's child it is 0. */
    uint64_t full;
    /* Writes to devices that failed. */
    uint64_t write_errors;
};

/*
 * Opens. memory_bytes is the limit of what all regions together keep in memory, at least 16 MiB (1 << 24).
 * devices are count specifications, used by priority: "PATH[,size=8G][,pri=5][,discard][,rotational]" or
 * "mem[,...]", in UTF-8, a PATH without commas. The room of each counts in whole 64 MiB, one at least. A file that is not there is
 * made without a name; others must not be able to write to the directory of one that is, as to /tmp. With count 0: an unlinked file
 * in $TMPDIR, else in the working directory. A file of PATH that was empty is empty again after pageout_close(); where the
 * process ends without it, it holds what was in memory, and is refused the next time (mkswap makes it fit again).
 * The standard error of now stays open until then, for the engine's last word. What a thread sets for another one's class or CPUs
 * (sched_setscheduler(), sched_setaffinity()) while that one touches what is out may be lost. The engine's threads may run where the
 * caller may, and are of its class. Not in a constructor of a library that is loaded by dlopen(): its threads would wait until that
 * is over, and the call for them.
 */
pageout *pageout_open(uint64_t memory_bytes, const char *const *devices, size_t count);

/*
 * The same, with faults that are answered by the thread that takes them, in a handler of SIGBUS, and not by a thread of
 * the engine that it waits for. From memory ("mem") that takes three fifths of the time, for up to 16 threads at once as far as there are
 * CPUs; it needs no rights. In exchange:
 *
 * - A system call that is given memory that is out fails with EFAULT, or stops short: pageout_pin() what it is given.
 *   read() and write() of the C library are system calls; futex words (locks) and paths count, too.
 * - A thread that touches a region must not block SIGBUS; nor must a handler that does (sa_mask). In the program's own
 *   handler of SIGBUS that means SA_NODEFER.
 * - A handler of SIGBUS that the program had before is called for all that is not a region's, as the kernel would, and
 *   for bytes that are lost; but on the stack for signals (sigaltstack), if there is one, without SA_ONSTACK too. One
 *   that is installed later must pass on what it does not know to the one that sigaction() returned. Other handlers may
 *   touch regions; the later one must be installed with all signals blocked then (sigfillset() of its sa_mask), since
 *   SIGBUS is blocked until it has passed on.
 * - Two descriptors are in the program's table, with high numbers and close-on-exec. If they are closed, faults take
 *   longer. The library must not be unloaded.
 */
pageout *pageout_open_inline(uint64_t memory_bytes, const char *const *devices, size_t count);

/*
 * Ends the engine and unmaps every region that is left. swap is invalid afterwards, also for other threads. NULL is
 * allowed. In the child of a fork: only frees the handle.
 */
void pageout_close(pageout *swap);

/*
 * Maps length bytes of zeros, 1 byte to 64 TiB, at a multiple of 2 MiB. Nothing is in memory until it is touched.
 * A handler of a signal may touch it, but for one that can interrupt malloc() where that has fewer locks than there are
 * threads (musl; glibc with MALLOC_ARENA_MAX, or with more than eight threads a CPU): pageout_pin() what that one touches.
 * The engine would wait for the lock that the interrupted thread holds, for ever. A robust mutex must be pinned: the kernel
 * marks it when its owner ends, and waits for no page then. Do not call madvise(MADV_DOFORK): a child would read zeros;
 * nor put up guard pages (MADV_GUARD_INSTALL): what is out there comes back as it was when they are taken down.
 * Nor mremap(), munmap() or mmap(MAP_FIXED) of a part: what was moved away and is out at pageout_close() is lost (SIGBUS), and
 * what was mapped in its place goes with the region. What mprotect() has made read-only does not leave, and counts. Each region is
 * three of vm.max_map_count. Who looks from outside (/proc/PID/mem, debuggers) gets EIO for what is out; core dumps do not have
 * it.
 */
void *pageout_map(pageout *swap, size_t length);

/* Unmaps a region: address is what pageout_map() returned. Fails while bytes of it are pinned. */
int pageout_unmap(pageout *swap, void *address);

/* Says what is expected of length bytes from address on, all in one region. advice: see enum pageout_advice. */
int pageout_advise(pageout *swap, void *address, size_t length, int advice);

/*
 * Brings length bytes from address on in, and keeps them in until pageout_unpin() was called with the same address and length as
 * often; no bytes are nothing to keep. Counts by 64 KiB, each of which can be pinned 65,535 times.
 * At most half of the limit can be pinned. Buffers of system calls need a pin after pageout_open_inline() only; bytes lent to the kernel by
 * vmsplice, MSG_ZEROCOPY and the like do, as long as they are lent.
 */
int pageout_pin(pageout *swap, const void *address, size_t length);
int pageout_unpin(pageout *swap, const void *address, size_t length);

/* Fills out. size is sizeof *out: callers built with an older header get what they know. */
int pageout_stats(pageout *swap, struct pageout_stats *out, size_t size);

/* Why the last call of this thread that failed did so; "" if none did. Good until the next call that fails. */
const char *pageout_error(void);

#ifdef __cplusplus
}
#endif

#endif
